"""The plan of a pull: which bytes of which ranks' Megatron shards become which bytes of an engine worker's parameters.

Every rank computes it alike from names, sizes and the ranks' places. The layouts themselves are said in one place only, kinds.py: a
parameter's kind is run once over *numbers* in place of weights (where does each row of the engine's tensor come from?), and the answer,
joined into stretches, is the plan. So whatever a kind can express, the pull can do.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

import torch

from megaflow.parallel.pieces import ZEROS, Piece, Reading, Target
from megaflow.shape import ModelShape
from megaflow.types import Layout
from megaflow.weights.kinds import Kind
from megaflow.weights.plan import expert_layout, experts_of, shard_shape
from megaflow.weights.reshard import engine_parts
from megaflow.weights.table import Row, table


@dataclass(frozen=True)
class Place:
    """Where a rank is: its host, and its index on each of the actor's axes."""

    rank: int
    host: str
    tp: int = 0
    pp: int = 0
    dp: int = 0
    ep: int = 0
    etp: int = 0


@dataclass(frozen=True)
class Source:
    """The actor: the sizes of its axes and its ranks' places."""

    places: tuple[Place, ...]  # by rank
    tp: int = 1
    pp: int = 1
    vpp: int = 1
    ep: int = 1
    etp: int = 1

    def shards_of(self, row: Row) -> int:
        """Into how many shards a parameter is cut."""
        return self.etp if row.expert >= 0 else self.tp

    def holders(self, row: Row, shard: int | None, shape: ModelShape) -> list[Place]:
        """Ranks that have a shard (None: any, for the parameter is whole on each of them)."""
        stage = row.stage(self.pp, shape.num_layers, self.vpp)
        found = [p for p in self.places if p.pp == stage]
        if row.expert >= 0:
            found = [p for p in found if p.ep == row.expert * self.ep // shape.experts.count]
        axis = "etp" if row.expert >= 0 else "tp"
        return [p for p in found if shard is None or getattr(p, axis) == shard]

    def choose(self, row: Row, shard: int | None, shape: ModelShape, reader: int) -> Place | None:
        """Whom the worker beside rank `reader` reads a shard from: its own rank, or one of its own replica, so that all are asked equally
        often, or the next one; always on its own host. None: nobody there has it."""
        me, world = self.places[reader], len(self.places)
        here = [p for p in self.holders(row, shard, shape) if p.host == me.host]
        return min(here, key=lambda p: (p.rank != reader, p.dp != me.dp, (p.rank - reader) % world), default=None)


class Stretch(NamedTuple):
    """`count` neighbours along the axis of the cut: from `start` of a shard to `target_start` of a part."""

    shard: int  # ZEROS: padding
    start: int
    target_start: int
    count: int


def trace(kind: Kind, width: int, shards: int, layout: Layout, shape: ModelShape) -> list[tuple[int, list[Stretch]]]:
    """For each part that the engine worker stores: (its length along the cut, its stretches). `width`: length of one shard."""
    axis = kind.dim or 0
    numbers = [torch.arange(i * width, (i + 1) * width).add_(1) for i in range(shards)]  # 0 is left for padding
    numbers = [n[:, None] if axis == 0 else n[None] for n in numbers]
    return [(part.numel(), _stretches(part.reshape(-1), width)) for part in engine_parts(kind, numbers, shape, layout)]


def _stretches(numbers: torch.Tensor, width: int) -> list[Stretch]:
    """Cut where the next number is not the next one of the same shard; zeros are one stretch."""
    shard = torch.where(numbers > 0, (numbers - 1) // width, ZEROS)
    expected = torch.where(numbers > 0, numbers + 1, 0)[:-1]
    breaks = ((numbers[1:] != expected) | (shard[1:] != shard[:-1])).nonzero()[:, 0].add_(1).tolist()
    edges = [0, *breaks, len(numbers)]
    found = []
    for a, b in itertools.pairwise(edges):
        owner = int(shard[a])
        found.append(Stretch(owner, 0 if owner == ZEROS else int(numbers[a] - 1) % width, a, b - a))
    return found


def make_reading(shape: ModelShape, source: Source, layout: Layout, reader: int, dtype: torch.dtype) -> Reading:
    """The plan of the engine worker beside rank `reader`, which stores `layout`. Needs `can_pull`."""
    targets: dict[str, Target] = {}
    pieces: list[Piece] = []
    index: dict[str, int] = {}
    traces: dict = {}
    chosen: dict = {}
    for row in table(shape):
        if row.expert >= 0 and row.expert not in experts_of(shape, layout):
            continue
        for target, part_offset, tail, stretches in _parts(row, shape, source, layout, dtype, traces):
            number = index.setdefault(target.name, len(index))
            targets.setdefault(target.name, target)
            pieces += _pieces(row, shape, source, reader, number, part_offset, tail, stretches, chosen)
    return Reading(reader, list(targets.values()), pieces)


class _Tail(NamedTuple):
    """Bytes of one step along the cut, and what lies around it."""

    axis: int
    unit: int  # bytes of one step: a row for axis 0, one element for axis 1
    rows: int  # 1 for axis 0
    length: int  # of the shard along the cut
    target_length: int


def _parts(row: Row, shape: ModelShape, source: Source, layout: Layout, dtype: torch.dtype, traces: dict):
    """(target, byte offset of the part in it, tail, stretches) of each part of a row. Parts of a fused target lie one after another; the
    experts of a layer are slots of one target."""
    shards = source.shards_of(row)
    shard = shard_shape(row, shape, shards)
    kind, axis = row.kind, row.kind.dim or 0
    itemsize = 4 if row.fp32 else dtype.itemsize
    name_of_dtype = "float32" if row.fp32 else str(dtype).removeprefix("torch.")
    key = (kind, shard[axis], shards, row.expert >= 0)
    if key not in traces:  # the same for all layers
        traces[key] = trace(kind, shard[axis], 1 if kind.dim is None else shards, expert_layout(row, layout), shape)
    traced = traces[key]
    joint = row.joint if layout.fused else None
    fused = layout.fused and (len(traced) > 1 or row.expert >= 0 or joint is not None)
    names = [row.fused] * len(traced) if fused else row.hf
    first, total = joint or (0, sum(length for length, _ in traced))
    slot, offset = (), first * math.prod(shard[1:]) * itemsize
    if row.expert >= 0 and layout.fused:
        slot = (len(experts_of(shape, layout)),)
    across = shard[1] if axis == 1 else math.prod(shard[1:])
    for name, (length, stretches) in zip(names, traced, strict=True):
        if axis == 0:
            size = (total if fused else length, *shard[1:])
            tail = _Tail(0, math.prod(shard[1:]) * itemsize, 1, shard[0], length)
        else:
            size = (shard[0], length)
            tail = _Tail(1, itemsize, shard[0], across, length)
        number = row.expert - experts_of(shape, layout).start if slot else 0
        start = offset + number * math.prod(size) * itemsize
        yield Target(name, (*slot, *size), name_of_dtype), start, tail, stretches
        offset += length * tail.unit if fused else 0


def _pieces(row, shape, source, reader, target: int, part_offset: int, tail: _Tail, stretches, chosen: dict) -> Iterable[Piece]:
    stage = row.stage(source.pp, shape.num_layers, source.vpp)
    for s in stretches:
        row_bytes = s.count * tail.unit
        strides = (tail.length * tail.unit, tail.target_length * tail.unit) if tail.axis == 1 else (row_bytes, row_bytes)
        there = (part_offset + s.target_start * tail.unit, strides[1], tail.rows, row_bytes)
        if s.shard == ZEROS:
            yield Piece(ZEROS, stage, "", target, 0, 0, *there)
            continue
        shard = None if row.kind.dim is None else s.shard
        key = (stage, row.expert, shard)
        if key not in chosen:
            chosen[key] = source.choose(row, shard, shape, reader).rank
        rank = chosen[key]
        yield Piece(rank, stage, row.megatron, target, s.start * tail.unit, strides[0], *there)


def can_pull(shape: ModelShape, source: Source) -> bool:
    """Whether every engine worker finds all that it may want on its own host."""
    rows = {}
    for row in table(shape):
        rows.setdefault((row.stage(source.pp, shape.num_layers, source.vpp), row.expert), row)
    for reader in range(len(source.places)):
        for row in rows.values():
            if any(source.choose(row, shard, shape, reader) is None for shard in range(source.shards_of(row))):
                return False
    return True
