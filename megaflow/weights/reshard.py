"""Fill the engine's buckets from live Megatron parameters, bucket by bucket, with no full copy of the model anywhere."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from megaflow.parallel.mesh import Mesh
from megaflow.shape import ModelShape
from megaflow.types import Layout
from megaflow.weights.kinds import Kind, Vocab, pad_rows
from megaflow.weights.plan import Bucket, Item, Plan

Acquire = Callable[[int], Tensor]  # bytes wanted -> a flat uint8 buffer that is free to be written


@dataclass
class FilledBucket:
    """A bucket whose bytes lie in `data` [nbytes] uint8, in the engine's layout."""

    plan: Bucket
    data: Tensor
    dtype: torch.dtype

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        for e in self.plan.entries:
            yield e.name, self.data[e.offset : e.offset + e.nbytes].view(self.dtype).view(e.shape)


class Resharder:
    """Moves the parameters of an actor into buckets of an engine's layout.

    parameters   global Megatron name -> this rank's live shard; only those of its own pipeline stage
    mesh         its pp axis: the ranks of the same shard in all stages; its tp axis: those that hold the other shards
    flip         bucket in which the engine is to change a value, for tests; -1: none
    """

    transport = "buckets"

    def __init__(self, plan: Plan, shape: ModelShape, parameters: dict[str, Tensor], mesh: Mesh):
        self.plan, self.shape, self.parameters = plan, shape, parameters
        self.flip = -1
        self.stage = mesh.pp.index
        self.pp_group, self.pp_ranks, self.tp_group = mesh.pp.group, mesh.pp.ranks, mesh.tp.group
        self._check_owned()

    def _check_owned(self) -> None:
        for bucket in self.plan.buckets:
            for item in bucket.items if bucket.stage == self.stage else ():
                found = self.parameters.get(item.row.megatron)
                assert found is not None, f"stage {self.stage} should own {item.row.megatron}"
                assert tuple(found.shape) == item.shard_shape, f"{item.row.megatron}: {tuple(found.shape)}, planned {item.shard_shape}"

    @property
    def entries(self) -> list[list[tuple]]:
        """For each bucket, (name, shape, offset, nbytes) of every tensor in it."""
        return [[(e.name, e.shape, e.offset, e.nbytes) for e in bucket.entries] for bucket in self.plan.buckets]

    @property
    def nbytes(self) -> int:
        """That this rank hands to its engine worker."""
        return self.plan.nbytes

    @torch.no_grad()
    def stream(self, acquire: Acquire) -> Iterator[FilledBucket]:
        """Collective over tp x pp. Buckets in plan order; the buffer of one may be reused once the consumer says so through `acquire`."""
        fill = self._fill_direct if self.plan.mode == "direct" else self._fill_by_gather
        for bucket in self.plan.buckets:
            data = acquire(bucket.nbytes)[: bucket.nbytes]
            fill(bucket, data)
            yield FilledBucket(bucket, data, self.plan.dtype)

    def _fill_direct(self, bucket: Bucket, data: Tensor) -> None:
        """The owner writes the engine's layout, then the bucket itself is broadcast over the stages: no staging copy."""
        if bucket.stage == self.stage:
            for item in bucket.items:
                self._write(item, item.row.kind.join([self.parameters[item.row.megatron]], self.shape), data)
        if self.plan.pp > 1:
            dist.broadcast(data, self.pp_ranks[bucket.stage], group=self.pp_group)

    def _fill_by_gather(self, bucket: Bucket, data: Tensor) -> None:
        """Shards of one stage travel to all stages, then over tp; then each tensor is joined and the engine's part cut out."""
        mine = self._staged(bucket, data.device)
        everyone = [mine]
        if self.plan.tp > 1:
            joined = torch.empty(self.plan.tp * mine.numel(), dtype=mine.dtype, device=mine.device)
            dist.all_gather_into_tensor(joined, mine, group=self.tp_group)
            everyone = list(joined.chunk(self.plan.tp))
        for item in bucket.items:
            size = math.prod(item.shard_shape)
            shards = [flat[item.staging_offset : item.staging_offset + size].view(item.shard_shape) for flat in everyone]
            self._write(item, engine_parts(item.row.kind, shards, self.shape, self.plan.layout), data)

    def _staged(self, bucket: Bucket, device: torch.device) -> Tensor:
        flat = torch.empty(bucket.staging_numel, dtype=self.plan.dtype, device=device)
        if bucket.stage == self.stage:
            for item in bucket.items:
                size = math.prod(item.shard_shape)
                flat[item.staging_offset : item.staging_offset + size].view(item.shard_shape).copy_(self.parameters[item.row.megatron])
        if self.plan.pp > 1:
            dist.broadcast(flat, self.pp_ranks[bucket.stage], group=self.pp_group)
        return flat

    def _write(self, item: Item, parts: list[Tensor], data: Tensor) -> None:
        """Parts lie one after another, whether the engine calls them one tensor or several."""
        if len(item.entries) == len(parts):
            starts = [e.offset for e in item.entries]
        else:
            sizes = [p.numel() * self.plan.dtype.itemsize for p in parts]
            starts = [item.entries[0].offset + sum(sizes[:i]) for i in range(len(parts))]
        for start, part in zip(starts, parts, strict=True):
            view = data[start : start + part.numel() * self.plan.dtype.itemsize].view(self.plan.dtype).view(part.shape)
            view.copy_(part)


def engine_parts(kind: Kind, shards: list[Tensor], shape: ModelShape, layout: Layout) -> list[Tensor]:
    """All Megatron shards of a parameter -> the parts that one engine worker stores."""
    full = kind.join(shards, shape)
    if isinstance(kind, Vocab):
        rows = shape.padded_vocab(1) if layout.fused else shape.vocab_size
        full = [pad_rows(full[0][:rows], rows)]
    return kind.engine_parts(full, layout.tp, layout.rank, shape)
