"""What must be mended in Megatron-core 0.19.2 while it saves and loads. tests/dist/test_checkpoint.py shows that each is needed."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from torch import Tensor

from megaflow.checkpoint.staging import HostMemory
from megaflow.parallel import device


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
def gathered_to(memory: HostMemory, optimizer: Any) -> Iterator[None]:
    """For the time of the block, the distributed optimizer puts its state into `memory`, each parameter's by itself.

    Megatron joins its buckets without the padding at their ends, then cuts parameters out at offsets that count it: all parameters
    behind a padded bucket are saved shifted, without an error. Seen with tied embeddings under PP, which get a bucket of their own.
    It also copies every value through four tensors of fresh, pageable memory.
    """
    parts = [o for o in chained(optimizer) if isinstance(o, DistributedOptimizer)]
    for part in parts:
        part.get_parameter_state_dp_zero = functools.partial(_whole_state, memory, part)
    try:
        yield
    finally:
        for part in parts:
            del part.get_parameter_state_dp_zero


class _Pieces:
    """Looks to Megatron like one long tensor, of which it takes each parameter's part."""

    def __init__(self, pieces: dict[tuple[int, int], Tensor]):
        self.pieces = pieces

    def __getitem__(self, place: slice) -> Tensor:
        return self.pieces[place.start, place.stop]


def _whole_state(memory: HostMemory, optimizer: Any, use_gloo_comm: bool, empty_data: bool, return_on_all_ranks: bool) -> dict[int, Any]:
    """Collective over the data-parallel ranks, each of which gets the whole of: main parameters and both moments, fp32, on the host.

    empty_data: only tensors of the right sizes, to load into.
    """
    assert return_on_all_ranks and not use_gloo_comm, "how fully_reshardable calls it"
    keys = ("param", *optimizer.optimizer_state_keys)
    state: dict[int, Any] = {}
    for number, by_dtype in enumerate(optimizer.gbuf_ranges):
        buffer = optimizer.buffers[number]
        ((dtype, buckets),) = by_dtype.items()
        places = {p: tuple(place[:2]) for p, place in buffer.param_index_map.items()}
        like = {place: torch.empty(place[1] - place[0], dtype=torch.float32, device="meta") for place in places.values()}
        found = {key: {place: memory.take(each) for place, each in like.items()} for key in keys}
        state[number] = {dtype: {key: _Pieces(found[key]) for key in keys}}
        if not empty_data:
            for bucket, ranges in zip(buffer.buckets, buckets, strict=True):
                _gather_bucket(optimizer, bucket, ranges["param_map"], places, found)
    device.synchronize()
    return state


def _gather_bucket(optimizer: Any, bucket: Any, ranges: dict[Any, Any], places: dict[Any, tuple[int, int]], found: dict[str, Any]) -> None:
    """Each rank holds an equal part of the bucket; with several ranks, the parts are gathered where they are, then copied to the host."""
    own = {p: optimizer._get_main_param_and_optimizer_states(p) for p in ranges}
    ranks = optimizer.data_parallel_group.size()
    if ranks == 1:
        for p, tensors in own.items():
            for key, pieces in found.items():
                pieces[places[p]].copy_(tensors[key].detach().view(-1), non_blocking=True)
        return
    size = bucket.grad_data.numel()
    local, whole = (torch.zeros(n, dtype=torch.float32, device=bucket.grad_data.device) for n in (size // ranks, size))
    for key, pieces in found.items():
        for p, tensors in own.items():
            local[ranges[p]["gbuf_local"].start : ranges[p]["gbuf_local"].end] = tensors[key].detach().view(-1)
        torch.distributed.all_gather(list(whole.chunk(ranks)), local, optimizer.data_parallel_group)
        for p in bucket.params_list:
            start, end = (place - bucket.offset for place in places[p])
            pieces[places[p]].copy_(whole[start:end], non_blocking=True)


def separate_steps(optimizer: Any) -> None:
    """Give each parameter a `step` of its own: loading leaves one tensor for all, which every Adam step would count up once for each."""
    for part in chained(optimizer):
        for state in part.optimizer.state.values():
            state["step"] = state["step"].clone()
