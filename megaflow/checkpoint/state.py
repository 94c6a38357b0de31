"""What is saved of an actor, in the names that Megatron's distributed checkpoint gives it, and how it is put back."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Protocol

import numpy as np
import torch
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import is_main_replica
from megatron.core.dist_checkpointing.utils import add_prefix_for_sharding
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.tensor_parallel import random as megatron_random

from megaflow.checkpoint import mends
from megaflow.checkpoint.staging import HostMemory
from megaflow.parallel import device
from megaflow.parallel.mesh import Mesh


class Trainable(Protocol):
    """What can be saved: a Megatron model (as wrapped for training), its optimizer and its schedule."""

    model: Any  # actor.chunks.Chunks: its `unwrapped()` are the GPTModels of this rank
    optimizer: Any  # MegatronOptimizer
    scheduler: Any  # OptimizerParamScheduler
    skipped_in_a_row: int


def sharded_state(trainable: Trainable, memory: HostMemory, critic: Trainable | None = None, is_loading: bool = False) -> dict[str, Any]:
    """Collective. Model and optimizer as Megatron's sharded tensors, each under its name in the whole model; a critic's under "critic.".

    `fully_reshardable`: optimizer state in the shapes of the parameters, so that any layout can read it. The distributed optimizer's is
    collected in `memory` over the data-parallel ranks: 12 bytes for each parameter of the model-parallel rank. All else is live.
    """
    metadata = {
        "distrib_optim_sharding_type": "fully_reshardable",
        "singleton_local_shards": False,
        "chained_optim_avoid_prefix": True,
    }
    model = {f"model{i}": gpt.sharded_state_dict(metadata=metadata) for i, gpt in enumerate(trainable.model.unwrapped())}
    with mends.gathered_to(memory, trainable.optimizer):
        whole = model["model0"] if len(model) == 1 else model
        optimizer = trainable.optimizer.sharded_state_dict(whole, is_loading=is_loading, metadata=metadata)
    state = {**model, "optimizer": optimizer}
    if critic is not None:
        state["critic"] = sharded_state(critic, memory, is_loading=is_loading)
        add_prefix_for_sharding(state["critic"], "critic.")
    return state


def num_bytes(state: dict[str, Any]) -> int:
    """What this rank would write, before the work is spread over the data-parallel ranks."""
    tensors = (t for t in nested_values(state) if getattr(t, "data", None) is not None and hasattr(t, "replica_id"))
    return sum(t.data.nbytes for t in tensors if is_main_replica(t.replica_id) and isinstance(t.data, torch.Tensor))


def counters(trainable: Trainable) -> dict[str, Any]:
    """What there is beside tensors: JSON values."""
    return {"skipped_in_a_row": trainable.skipped_in_a_row, "scheduler": trainable.scheduler.state_dict()}


def restore(trainable: Trainable, loaded: dict[str, Any], saved: dict[str, Any]) -> None:
    """Put loaded values in place. saved: the `counters`.

    Hyperparameters (learning rate, betas, schedule) are the present run's, so that a resumed run can change them.
    """
    for i, gpt in enumerate(trainable.model.unwrapped()):
        gpt.load_state_dict(loaded[f"model{i}"])
    parts = mends.chained(trainable.optimizer)
    values_of = mends.rechained(loaded["optimizer"], len(parts))
    states = [values_of] if len(parts) == 1 else [values_of[i] for i in range(len(parts))]
    for optimizer, values in zip(parts, states, strict=True):
        _keep_hyperparameters(optimizer, values)
    trainable.optimizer.load_state_dict(values_of)
    mends.separate_steps(trainable.optimizer)
    trainable.scheduler.num_steps = 0
    trainable.scheduler.step(increment=saved["scheduler"]["num_steps"])
    trainable.skipped_in_a_row = saved["skipped_in_a_row"]


def _keep_hyperparameters(optimizer: Any, saved: dict[str, Any]) -> None:
    """Megatron would look for a group with equal learning rates in the checkpoint, and take everything else from there."""
    present = [{k: v for k, v in group.items() if k not in ("params", "step")} for group in optimizer.optimizer.param_groups]
    if isinstance(optimizer, DistributedOptimizer):  # its groups are without parameters; the only state in them is the step
        step = saved["optimizer"]["param_groups"][0]["step"]
        saved["optimizer"]["param_groups"] = [{**group, "step": step} for group in present]
    else:
        groups = saved.get("optimizer", saved)["param_groups"]
        for group, values in zip(groups, present, strict=True):
            group.update(values)


def model_facts(trainable: Trainable) -> dict[str, Any]:
    """Sizes that a checkpoint and a model must have in common. The vocabulary is the padded one, the rows that exist."""
    gpt = trainable.model.unwrapped()[0]
    names = ("num_layers", "hidden_size", "ffn_hidden_size", "num_attention_heads", "num_query_groups", "kv_channels")
    facts = {name: getattr(gpt.config, name) for name in names}
    return facts | {
        "vocab_size": gpt.vocab_size,
        "tied_embeddings": gpt.share_embeddings_and_output_weights,
        "qkv_bias": gpt.config.add_qkv_bias,
        "qk_norm": gpt.config.qk_layernorm,
        "experts": gpt.config.num_moe_experts or 0,
        "dtype": str(gpt.config.params_dtype).removeprefix("torch."),
        "distributed_optimizer": any(isinstance(o, DistributedOptimizer) for o in mends.chained(trainable.optimizer)),
    }


def layout(mesh: Mesh) -> dict[str, int]:
    axes = {name: getattr(mesh, name).size for name in ("tp", "pp", "dp", "cp", "ep", "etp")}
    return {"world": mesh.world_size, **axes}


def rng_state() -> dict[str, Any]:
    """This rank's random states, as plain values and tensors only, so that they can be read without unpickling code."""
    libraries = device.rng_state()
    name, words, *rest = libraries["numpy"]
    libraries["numpy"] = (name, words.tolist(), *rest)
    return {"libraries": libraries, "megatron": megatron_random.get_cuda_rng_tracker().get_states()}


def set_rng_state(state: dict[str, Any]) -> None:
    libraries = state["libraries"]
    name, words, *rest = libraries["numpy"]
    device.set_rng_state(libraries | {"numpy": (name, np.array(words, dtype=np.uint32), *rest)})
    megatron_random.get_cuda_rng_tracker().set_states(state["megatron"])


def differences(saved: dict[str, Any], present: dict[str, Any]) -> Iterator[str]:
    for name, value in present.items():
        if saved.get(name) != value:
            yield f"{name}: {saved.get(name)} in the checkpoint, {value} here"
