"""What must be mended in Megatron-core 0.19.2 while it saves and loads. tests/dist/test_checkpoint.py shows that each is needed."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer


def chained(optimizer: Any) -> list[Any]:
    """Megatron's optimizers within one that may be a chain of them."""
    return getattr(optimizer, "chained_optimizers", [optimizer])


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
