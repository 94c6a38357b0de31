"""What a model weighs as the configuration divides it: bytes of one rank of the actor, of one engine worker. The one source of these sums.

Sizes alone, no torch: the plan before a run, the preflight, the choice of actor.offload and the engine's cache all read it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from megaflow.config.schema import Config, ParallelConfig
from megaflow.shape import ModelShape

BYTES = {"bfloat16": 2, "float32": 4}


@dataclass(frozen=True)
class ActorBytes:
    """Of one rank, by kind."""

    parameters: float
    gradients: float
    optimizer: float

    @property
    def awake(self) -> float:
        return self.parameters + self.gradients + self.optimizer

    def asleep(self, offload: str) -> float:
        """What stays on the device; gradients are freed in any case. offload: none, optimizer or all."""
        return {"none": self.parameters + self.optimizer, "optimizer": self.parameters, "all": 0.0}[offload]


@dataclass(frozen=True)
class StageSizes:
    """Numbers of parameters that one rank of a pipeline stage holds: `dense` is the same on all data-parallel ranks, `experts` on those of
    the same ep and etp place."""

    dense: float
    experts: float

    @property
    def total(self) -> float:
        return self.dense + self.experts


def stage_sizes(shape: ModelShape, parallel: ParallelConfig, stage: int, head: str = "vocabulary") -> StageSizes:
    """head: vocabulary, or scalar (a critic, a reward model): one row that every rank has, and its own embedding.

    With tied embeddings and several stages the last one has a copy of the embedding.
    """
    tp, pp, h = parallel.tp, parallel.pp, shape.hidden_size
    layers = layers_of_stage(shape, parallel, stage)
    dense = sum(_dense_of_layer(shape, layer, tp) for layer in layers)
    experts = sum(_experts_of_layer(shape, layer) for layer in layers) / (parallel.ep * parallel.etp)
    vocabulary = shape.padded_vocab(tp) * h / tp
    is_first, is_last = stage == 0, stage == pp - 1
    dense += vocabulary * is_first + h * is_last
    if is_last and head == "scalar":
        dense += h + 1
    elif is_last and not (shape.tied and is_first):
        dense += vocabulary
    return StageSizes(dense, experts)


def layers_of_stage(shape: ModelShape, parallel: ParallelConfig, stage: int) -> list[int]:
    """Every pp-th of pp * vpp equal parts."""
    parts = parallel.pp * parallel.vpp
    return [layer for layer in range(shape.num_layers) if layer * parts // shape.num_layers % parallel.pp == stage]


def _dense_of_layer(shape: ModelShape, layer: int, tp: int) -> float:
    """Matrices and biases are cut by tp; norms are whole on every rank, and so are a router and the compressions of latent attention."""
    h, d, m, e = shape.hidden_size, shape.head_dim, shape.latent, shape.experts
    if m is None:
        qkv = (shape.num_heads + 2 * shape.num_kv_heads) * d
        attention = (qkv * h + shape.num_heads * d * h + qkv * shape.qkv_bias) / tp + 2 * d * shape.qk_norm
    else:
        attention = one_layer(replace(shape, experts=None)) - 2 * h - 3 * h * shape.ffn_size
        attention /= tp
    if not shape.is_sparse(layer):
        return 2 * h + attention + 3 * h * shape.ffn_size / tp
    return 2 * h + attention + e.count * h + 3 * h * e.shared_ffn_size / tp + h * e.shared_gate


def one_layer(shape: ModelShape) -> int:
    """Parameters of one dense layer, whole."""
    return replace(shape, num_layers=1).num_parameters - replace(shape, num_layers=0).num_parameters


def _experts_of_layer(shape: ModelShape, layer: int) -> float:
    e = shape.experts
    return e.count * 3 * shape.hidden_size * e.ffn_size if shape.is_sparse(layer) else 0.0


def trained_bytes(config: Config, shape: ModelShape, world_size: int, stage: int = 0, head: str = "vocabulary") -> ActorBytes:
    """Of a rank of `stage`. Gradients in fp32; main weights (16-bit training only) and two moments in fp32, which the distributed optimizer
    splits over the ranks that hold the same parameters (ZeRO's first stage, Rajbhandari et al. 2020, section 5.1)."""
    parallel, size = config.parallel, BYTES[config.model.dtype]
    held = stage_sizes(shape, parallel, stage, head)
    each = 8 + 4 * (size == 2)
    dense = expert = 1
    if config.actor.distributed_optimizer:
        dense = max(1, world_size // (parallel.tp * parallel.pp))  # context-parallel ranks hold the same parameters too
        expert = max(1, world_size // (parallel.etp * parallel.ep * parallel.pp))
    return ActorBytes(held.total * size, held.total * 4, each * (held.dense / dense + held.experts / expert))


def saving_bytes(config: Config, shape: ModelShape, world_size: int, stage: int = 0, head: str = "vocabulary") -> float:
    """Host memory of a rank of `stage` for its checkpoints; with run.async_save it is held from the first save on.

    The distributed optimizer's state (main weights and moments, fp32) is collected whole on each data-parallel rank. All else is copied,
    for async_save only, by the rank that writes it: the data-parallel ranks share that work.
    """
    parallel = config.parallel
    held = stage_sizes(shape, parallel, stage, head).total
    data_parallel = max(1, world_size // (parallel.tp * parallel.pp * parallel.cp))
    is_distributed = config.actor.distributed_optimizer
    copied = BYTES[config.model.dtype] + (0 if is_distributed else 8 + 4 * (config.model.dtype == "bfloat16"))
    return held * (12 * is_distributed + copied / data_parallel * config.run.async_save)


def heaviest_stage(shape: ModelShape, parallel: ParallelConfig) -> int:
    """The stage whose ranks hold most parameters."""
    return max(range(parallel.pp), key=lambda stage: stage_sizes(shape, parallel, stage).total)


def weight_bytes(config: Config, shape: ModelShape) -> int:
    """Of one engine worker's weights."""
    return shape.num_parameters * BYTES[config.model.dtype] // config.rollout.tp


def kv_bytes_per_token(config: Config, shape: ModelShape) -> int:
    """Keys and values of one token in all layers, of one engine worker; with more workers than key/value heads each keeps one.

    With latent attention each worker keeps the compressed vector and the part with position instead.
    """
    size = BYTES[config.model.dtype]
    if shape.latent is not None:
        return shape.num_layers * (shape.latent.kv_rank + shape.latent.rope_dim) * size
    heads = max(1, shape.num_kv_heads // config.rollout.tp)
    return 2 * shape.num_layers * heads * shape.head_dim * size
