"""What is saved of an actor, in the names that Megatron's distributed checkpoint gives it, and how it is put back."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Protocol

import numpy as np
import torch
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import is_main_replica
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.tensor_parallel import random as megatron_random

from megaflow.checkpoint import mends
from megaflow.parallel import device
from megaflow.parallel.mesh import Mesh


class Trainable(Protocol):
    """What can be saved: a Megatron model (as wrapped for training), its optimizer and its schedule."""

    model: torch.nn.Module
    optimizer: Any  # MegatronOptimizer
    scheduler: Any  # OptimizerParamScheduler
    skipped_in_a_row: int


def sharded_state(trainable: Trainable, is_loading: bool = False) -> dict[str, Any]:
    """Collective. Model and optimizer as Megatron's sharded tensors, each under its name in the whole model.

    `fully_reshardable`: optimizer state in the shapes of the parameters, so that any layout can read it. It is collected in host memory
    over the data-parallel ranks: 12 bytes for each parameter of the model-parallel rank.
    """
    metadata = {
        "distrib_optim_sharding_type": "fully_reshardable",
        "singleton_local_shards": False,
        "chained_optim_avoid_prefix": True,
    }
    model = unwrap(trainable.model).sharded_state_dict(metadata=metadata)
    with mends.aligned_buckets(trainable.optimizer):
        optimizer = trainable.optimizer.sharded_state_dict(model, is_loading=is_loading, metadata=metadata)
    return {"model": model, "optimizer": optimizer}


def num_bytes(state: dict[str, Any]) -> int:
    """What this rank would write, before the work is spread over the data-parallel ranks."""
    tensors = (t for t in nested_values(state) if getattr(t, "data", None) is not None and hasattr(t, "replica_id"))
    return sum(t.data.nbytes for t in tensors if is_main_replica(t.replica_id) and isinstance(t.data, torch.Tensor))


def restore(trainable: Trainable, loaded: dict[str, Any], num_steps: int) -> None:
    """Put loaded values in place. `num_steps`: optimizer steps that the schedule has made.

    Hyperparameters (learning rate, betas, schedule) are the present run's, so that a resumed run can change them.
    """
    unwrap(trainable.model).load_state_dict(loaded["model"])
    parts = mends.chained(trainable.optimizer)
    saved = [loaded["optimizer"]] if len(parts) == 1 else [loaded["optimizer"][i] for i in range(len(parts))]
    for optimizer, values in zip(parts, saved, strict=True):
        _keep_hyperparameters(optimizer, values)
    trainable.optimizer.load_state_dict(loaded["optimizer"])
    mends.separate_steps(trainable.optimizer)
    trainable.scheduler.num_steps = 0
    trainable.scheduler.step(increment=num_steps)


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


def unwrap(model: torch.nn.Module) -> torch.nn.Module:
    while hasattr(model, "module"):
        model = model.module
    return model


def model_facts(trainable: Trainable) -> dict[str, Any]:
    """Sizes that a checkpoint and a model must have in common. The vocabulary is the padded one, the rows that exist."""
    gpt = unwrap(trainable.model)
    names = ("num_layers", "hidden_size", "ffn_hidden_size", "num_attention_heads", "num_query_groups", "kv_channels")
    facts = {name: getattr(gpt.config, name) for name in names}
    return facts | {
        "vocab_size": gpt.vocab_size,
        "tied_embeddings": gpt.share_embeddings_and_output_weights,
        "qkv_bias": gpt.config.add_qkv_bias,
        "qk_norm": gpt.config.qk_layernorm,
        "dtype": str(gpt.config.params_dtype).removeprefix("torch."),
        "distributed_optimizer": any(isinstance(o, DistributedOptimizer) for o in mends.chained(trainable.optimizer)),
    }


def layout(mesh: Mesh) -> dict[str, int]:
    return {"world": mesh.world_size, "tp": mesh.tp.size, "pp": mesh.pp.size, "dp": mesh.dp.size}


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
