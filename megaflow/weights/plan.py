"""The plan of a sync in buckets: which bytes go where. Made from names and sizes alone, so every rank finds the same and none negotiates.

Collectives bring a bucket to the ranks, so all of them have the same buckets in the same order. What a bucket becomes in an engine worker
may differ: with experts of its own (`rollout.ep`) a worker stores nothing of another one's.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch

from megaflow.config.schema import ParallelConfig
from megaflow.shape import ModelShape
from megaflow.types import Layout
from megaflow.weights.kinds import Compressed
from megaflow.weights.table import Row, table

ALIGN = 256  # bytes; keeps every entry aligned for vector loads and the digest's 64-bit words
ANY = -1  # in the place of an expert-parallel index: every rank has it


@dataclass(frozen=True)
class Entry:
    """One tensor within a bucket, or a part of one: `shape` of it, from element `first` on of the engine's tensor of `whole`."""

    name: str
    shape: tuple[int, ...]
    offset: int  # bytes
    nbytes: int
    dtype: torch.dtype
    whole: tuple[int, ...]
    first: int = 0


@dataclass(frozen=True)
class Item:
    """One Megatron parameter on its way: its shard [shard_shape], and the entries that it becomes; none if the worker does not store it."""

    row: Row
    shard_shape: tuple[int, ...]
    dtype: torch.dtype
    staging_offset: int  # bytes into the staging buffer of its bucket (unless direct)
    entries: tuple[Entry, ...]


class Way(NamedTuple):
    """How parameters get from their owners to the engine workers; those of one way travel together.

    owner    expert-parallel index of the ranks that have them
    direct   each rank's shard is its engine worker's; else the shards are joined and cut anew
    axis     over which shards are joined: tp, or etp of experts
    """

    stage: int
    owner: int
    direct: bool
    axis: str


@dataclass(frozen=True)
class Bucket:
    """Parameters of one pipeline stage that travel together."""

    index: int
    way: Way
    items: tuple[Item, ...]
    nbytes: int  # in the engine's layout
    staging_nbytes: int  # of one rank's Megatron shards

    @property
    def stage(self) -> int:
        return self.way.stage

    @property
    def entries(self) -> list[Entry]:
        return [e for item in self.items for e in item.entries]


@dataclass(frozen=True)
class Plan:
    """For one engine worker. mode: `direct` when all buckets are."""

    parallel: ParallelConfig
    layout: Layout
    buckets: tuple[Bucket, ...]

    @property
    def mode(self) -> str:
        return "direct" if all(b.way.direct for b in self.buckets) else "gather"

    @property
    def capacity(self) -> int:
        """Bytes of the largest bucket."""
        return max(b.nbytes for b in self.buckets)

    @property
    def nbytes(self) -> int:
        """Bytes that this rank hands to its engine worker."""
        return sum(b.nbytes for b in self.buckets)


def make_plan(shape: ModelShape, parallel: ParallelConfig, layout: Layout, dtype: torch.dtype, bucket_bytes: int) -> Plan:
    """The plan for an actor of `parallel` and an engine worker of `layout`."""
    rows = [(way_of(row, shape, parallel, layout), row) for row in table(shape)]
    mine = experts_of(shape, layout)
    rows = [(way, row) for way, row in rows if row.expert < 0 or not way.direct or row.expert in mine]
    rows.sort(key=lambda pair: pair[0])  # stable: forward order within a way
    buckets: list[Bucket] = []
    for group in _groups(rows, shape, layout, dtype, bucket_bytes):
        items, used, staged = [], 0, 0
        for _, row in group:
            its_dtype = torch.float32 if row.fp32 else dtype
            entries = []
            for name, part in engine_shapes(row, shape, layout) if row.expert < 0 or row.expert in mine else ():
                nbytes = math.prod(part) * its_dtype.itemsize
                entries.append(Entry(name, part, used, nbytes, its_dtype, *_place(row, part, shape, layout)))
                used += _aligned(nbytes)
            shard = shard_shape(row, shape, parallel.tp if row.expert < 0 else parallel.etp)
            items.append(Item(row, shard, its_dtype, staged, tuple(entries)))
            staged += _aligned(math.prod(shard) * its_dtype.itemsize)
        buckets.append(Bucket(len(buckets), group[0][0], tuple(items), used, staged))
    return Plan(parallel, layout, tuple(buckets))


def way_of(row: Row, shape: ModelShape, parallel: ParallelConfig, layout: Layout) -> Way:
    """Megatron numbers ranks so that etp and then ep vary fastest among experts, tp elsewhere; engine workers are numbered likewise."""
    p, stage = parallel, row.stage(parallel.pp, shape.num_layers, parallel.vpp)
    if row.expert < 0:
        is_workers = p.tp == layout.tp and not (p.tp > 1 and isinstance(row.kind, Compressed))
        return Way(stage, ANY, is_workers and layout.fused, "tp")
    if layout.ep > 1:
        is_workers = p.etp == 1 and p.ep == layout.ep
    else:
        is_workers = p.ep == 1 and p.etp == layout.tp
    direct = is_workers and layout.fused
    return Way(stage, ANY if direct else row.expert * p.ep // shape.experts.count, direct, "etp")


def _groups(
    rows: list[tuple[Way, Row]], shape: ModelShape, layout: Layout, dtype: torch.dtype, most: int
) -> Iterator[list[tuple[Way, Row]]]:
    """Cut where the way changes or `most` bytes are reached, counted as if the worker stored everything: alike for all workers."""
    group: list[tuple[Way, Row]] = []
    used = 0
    for way, row in rows:
        itemsize = 4 if row.fp32 else dtype.itemsize
        size = sum(_aligned(math.prod(part) * itemsize) for _, part in engine_shapes(row, shape, layout))
        if group and (group[-1][0] != way or used + size > most):
            yield group
            group, used = [], 0
        group.append((way, row))
        used += size
    yield group


def _aligned(nbytes: int) -> int:
    return (nbytes + ALIGN - 1) // ALIGN * ALIGN


def experts_of(shape: ModelShape, layout: Layout) -> range:
    """Numbers of the experts that an engine worker stores, of each layer."""
    if shape.experts is None:
        return range(0)
    count = shape.experts.count // layout.ep
    return range(layout.rank % layout.ep * count, (layout.rank % layout.ep + 1) * count)


def hf_shapes(row: Row, shape: ModelShape) -> list[tuple[int, ...]]:
    """Full sizes of the Hugging Face tensors of a row."""
    return list(row.sizes)


def shard_shape(row: Row, shape: ModelShape, tp: int) -> tuple[int, ...]:
    """Size of one Megatron shard."""
    full = hf_shapes(row, shape)
    total = [sum(s[0] for s in full), *full[0][1:]]
    if row.hf[0].split(".")[-2] in ("embed_tokens", "lm_head"):
        total[0] = shape.padded_vocab(tp)
    if row.kind.dim is not None:
        total[row.kind.dim] //= tp
    return tuple(total)


def engine_shapes(row: Row, shape: ModelShape, layout: Layout) -> list[tuple[str, tuple[int, ...]]]:
    """(name, size) of the tensors, or parts of tensors, that an engine worker stores for a row."""
    layout, parts = expert_layout(row, layout), []
    for name, full in zip(row.hf, hf_shapes(row, shape), strict=True):
        size, module = list(full), name.split(".")[-2]
        if layout.fused and module in ("embed_tokens", "lm_head"):
            size[0] = shape.padded_vocab(1)
        if row.kind.dim is not None and not isinstance(row.kind, Compressed):
            size[row.kind.dim] //= min(layout.tp, shape.num_kv_heads) if module in ("k_proj", "v_proj") else layout.tp
        parts.append(tuple(size))
    if layout.fused:
        return [(row.fused, (sum(p[0] for p in parts), *parts[0][1:]))]
    return list(zip(row.hf, parts, strict=True))


def expert_layout(row: Row, layout: Layout) -> Layout:
    """How a worker wants that row: an expert of its own is whole."""
    return Layout(fused=layout.fused) if row.expert >= 0 and layout.ep > 1 else layout


def _place(row: Row, part: tuple[int, ...], shape: ModelShape, layout: Layout) -> tuple[tuple[int, ...], int]:
    """(size of the engine's tensor, element at which the part begins)."""
    if not layout.fused:
        return part, 0
    if row.expert >= 0:
        mine = experts_of(shape, layout)
        return (len(mine), *part), (row.expert - mine.start) * math.prod(part)
    if row.joint is not None:
        first, rows = row.joint
        return (rows, *part[1:]), first * math.prod(part[1:])
    return part, 0
