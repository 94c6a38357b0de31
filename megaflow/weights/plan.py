"""The plan of a sync: which bytes go where. Made from names and sizes alone, so every rank finds the same one and none negotiates."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from megaflow.shape import ModelShape
from megaflow.types import Layout
from megaflow.weights.table import Row, table

ALIGN = 256  # bytes; keeps every entry aligned for vector loads and the digest's 64-bit words


@dataclass(frozen=True)
class Entry:
    """One tensor of the engine within a bucket."""

    name: str
    shape: tuple[int, ...]
    offset: int  # bytes
    nbytes: int


@dataclass(frozen=True)
class Item:
    """One Megatron parameter on its way: its shard [shard_shape], and the entries that it becomes."""

    row: Row
    shard_shape: tuple[int, ...]
    staging_offset: int  # elements into the staging buffer of its bucket (gather only)
    entries: tuple[Entry, ...]


@dataclass(frozen=True)
class Bucket:
    """Parameters of one pipeline stage that travel together."""

    index: int
    stage: int
    items: tuple[Item, ...]
    nbytes: int  # in the engine's layout
    staging_numel: int  # elements of one rank's Megatron shards

    @property
    def entries(self) -> list[Entry]:
        return [e for item in self.items for e in item.entries]


@dataclass(frozen=True)
class Plan:
    """mode `direct`: each rank's shard is its engine worker's shard; `gather`: the tp group's shards are joined and cut anew."""

    mode: str
    tp: int
    pp: int
    layout: Layout
    buckets: tuple[Bucket, ...]
    dtype: torch.dtype

    @property
    def capacity(self) -> int:
        """Bytes of the largest bucket."""
        return max(b.nbytes for b in self.buckets)

    @property
    def nbytes(self) -> int:
        """Bytes that this rank hands to its engine worker."""
        return sum(b.nbytes for b in self.buckets)


def make_plan(shape: ModelShape, tp: int, pp: int, layout: Layout, dtype: torch.dtype, bucket_bytes: int) -> Plan:
    """The plan for an actor of tp x pp and an engine worker of `layout`."""
    mode = "direct" if tp == layout.tp and layout.fused else "gather"
    buckets: list[Bucket] = []
    items: list[Item] = []
    used = staged = 0

    def close() -> None:
        nonlocal items, used, staged
        if items:
            stage = items[0].row.stage(pp, shape.num_layers)
            buckets.append(Bucket(len(buckets), stage, tuple(items), used, staged))
        items, used, staged = [], 0, 0

    rows = sorted(table(shape), key=lambda r: r.stage(pp, shape.num_layers))  # stable: forward order within a stage
    for row in rows:
        sizes = engine_shapes(row, shape, layout)
        size = sum(_aligned(math.prod(s) * dtype.itemsize) for _, s in sizes)
        new_stage = items and items[0].row.stage(pp, shape.num_layers) != row.stage(pp, shape.num_layers)
        if new_stage or used + size > bucket_bytes:
            close()
        entries = []
        for name, s in sizes:
            nbytes = math.prod(s) * dtype.itemsize
            entries.append(Entry(name, s, used, nbytes))
            used += _aligned(nbytes)
        shard = shard_shape(row, shape, tp)
        items.append(Item(row, shard, staged, tuple(entries)))
        staged += math.prod(shard)
    close()
    return Plan(mode, tp, pp, layout, tuple(buckets), dtype)


def _aligned(nbytes: int) -> int:
    return (nbytes + ALIGN - 1) // ALIGN * ALIGN


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
    """(name, size) of the tensors that an engine worker stores for a row."""
    parts = []
    for name, full in zip(row.hf, hf_shapes(row, shape), strict=True):
        size, module = list(full), name.split(".")[-2]
        if layout.fused and module in ("embed_tokens", "lm_head"):
            size[0] = shape.padded_vocab(1)
        if row.kind.dim is not None:
            size[row.kind.dim] //= min(layout.tp, shape.num_kv_heads) if module in ("k_proj", "v_proj") else layout.tp
        parts.append(tuple(size))
    if layout.fused and len(parts) > 1:
        return [(row.fused, (sum(p[0] for p in parts), *parts[0][1:]))]
    return list(zip(row.hf, parts, strict=True))
