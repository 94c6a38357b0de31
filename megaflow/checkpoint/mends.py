"""What must be mended in Megatron-core 0.19.2 while it saves and loads. tests/dist/test_checkpoint.py shows that each is needed."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer


def chained(optimizer: Any) -> list[Any]:
    """Megatron's optimizers within one that may be a chain of them."""
    return getattr(optimizer, "chained_optimizers", [optimizer])


def rechained(saved: dict[Any, Any], count: int) -> dict[Any, Any]:
    """Loaded values for a chain of `count` optimizers, whatever the chain that saved them.

    Megatron gives experts an optimizer of their own only where they lie on other ranks than the rest (ep > 1, or etp other than tp). It
    finds tensors by name, but plain values (the step, which all have in common) by the number in the chain: a KeyError otherwise.
    """
    plain = {k: v for k, v in saved.items() if not isinstance(k, int)}
    numbered = {k: v for k, v in saved.items() if isinstance(k, int)}
    if count == 1:
        return {**numbered.get(0, {}), **plain}
    shared = {**{k: v for k, v in numbered.get(0, {}).items() if k == "optimizer"}, **plain}
    copies = ({k: dict(v) if isinstance(v, dict) else v for k, v in shared.items()} for _ in range(count))
    return {i: {**copy, **numbered.get(i, {})} for i, copy in enumerate(copies)}


@contextmanager
def aligned_buckets(optimizer: Any) -> Iterator[None]:
    """For the time of the block, no padding is dropped where the distributed optimizer joins its buckets.

    `fully_reshardable` joins them without the padding at their ends, then cuts parameters out at offsets that count it: all parameters
    behind a padded bucket are saved shifted, without an error. Seen with tied embeddings under PP, which get a bucket of their own.
    """
    parts = [o for o in chained(optimizer) if isinstance(o, DistributedOptimizer)]
    buffers = [buffer for o in parts for buffer in o.buffers]
    sized = [(buffer, buffer.numel) for buffer in buffers] + [(k, k.grad_data.numel()) for buffer in buffers for k in buffer.buckets]
    before = [thing.numel_unpadded for thing, _ in sized]
    try:
        for thing, size in sized:
            thing.numel_unpadded = size
        yield
    finally:
        for (thing, _), size in zip(sized, before, strict=True):
            thing.numel_unpadded = size


def separate_steps(optimizer: Any) -> None:
    """Give each parameter a `step` of its own: loading leaves one tensor for all, which every Adam step would count up once for each."""
    for part in chained(optimizer):
        for state in part.optimizer.state.values():
            state["step"] = state["step"].clone()
