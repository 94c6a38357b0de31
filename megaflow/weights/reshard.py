"""Fill the engine's buckets from live Megatron parameters, bucket by bucket, with no full copy of the model anywhere."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from megaflow.monitor.progress import mark
from megaflow.parallel.mesh import Axis, Mesh
from megaflow.shape import ModelShape
from megaflow.types import Layout
from megaflow.weights.kinds import Kind, Vocab, pad_rows
from megaflow.weights.plan import ANY, Bucket, Item, Plan, expert_layout

Acquire = Callable[[int], Tensor]  # bytes wanted -> a flat uint8 buffer that is free to be written


@dataclass
class FilledBucket:
    """A bucket whose bytes lie in `data` [nbytes] uint8, in the engine's layout."""

    plan: Bucket
    data: Tensor

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        for e in self.plan.entries:
            yield e.name, self.data[e.offset : e.offset + e.nbytes].view(e.dtype).view(e.shape)


class Resharder:
    """Moves the parameters of an actor into buckets of an engine's layout.

    parameters   global Megatron name -> this rank's live shard; only those of its own pipeline stage and, of the experts, its own ones
    plans        for each worker of this rank's engine, by tp rank: buckets are the same, what becomes of them may differ
    mesh         its pp axis: the ranks of the same shard in all stages; tp and etp: those that hold the other shards; ep: the other experts
    flip         bucket in which the engine is to change a value, for tests; -1: none
    """

    transport = "buckets"

    def __init__(self, plans: list[Plan], shape: ModelShape, parameters: dict[str, Tensor], mesh: Mesh):
        self.plans, self.plan = plans, plans[mesh.rollout.index]
        self.shape, self.parameters, self.mesh = shape, parameters, mesh
        self.flip = -1
        self._check_owned()

    def _check_owned(self) -> None:
        for bucket in self.plan.buckets:
            for item in bucket.items if self._owns(bucket) else ():
                found = self.parameters.get(item.row.megatron)
                assert found is not None, f"stage {self.mesh.pp.index}, ep {self.mesh.ep.index} should own {item.row.megatron}"
                assert tuple(found.shape) == item.shard_shape, f"{item.row.megatron}: {tuple(found.shape)}, planned {item.shard_shape}"
                assert found.dtype == item.dtype, f"{item.row.megatron}: {found.dtype}, planned {item.dtype}"

    def _owns(self, bucket: Bucket) -> bool:
        return bucket.stage == self.mesh.pp.index and bucket.way.owner in (ANY, self.mesh.ep.index)

    @property
    def entries(self) -> list[list[list[tuple]]]:
        """For each worker of the engine (one for all, if they do not differ) and bucket, of every tensor or part of one in it: name, size
        of the engine's whole tensor, first element in that, offset and bytes in the bucket, dtype."""
        found = []
        for plan in self.plans if self.plan.layout.ep > 1 else self.plans[:1]:
            tuples = [[(e.name, e.whole, e.first, e.offset, e.nbytes, str(e.dtype).removeprefix("torch.")) for e in b.entries]
                      for b in plan.buckets]  # fmt: skip
            found.append(tuples)
        return found

    @property
    def nbytes(self) -> int:
        """That this rank hands to its engine worker."""
        return self.plan.nbytes

    @torch.no_grad()
    def stream(self, acquire: Acquire) -> Iterator[FilledBucket]:
        """Collective. Buckets in plan order; the buffer of one may be reused once the consumer says so through `acquire`."""
        for bucket in self.plan.buckets:
            mark("bucket", bucket.index + 1, len(self.plan.buckets))
            data = acquire(bucket.nbytes)[: bucket.nbytes]
            self._fill_direct(bucket, data) if bucket.way.direct else self._fill_by_gather(bucket, data)
            yield FilledBucket(bucket, data)

    def _fill_direct(self, bucket: Bucket, data: Tensor) -> None:
        """The owner writes the engine's layout, then the bucket itself is broadcast over the stages: no staging copy."""
        if bucket.stage == self.mesh.pp.index:
            for item in bucket.items:
                self._write(item, item.row.kind.join([self.parameters[item.row.megatron]], self.shape), data)
        self._over_stages(bucket, data)

    def _fill_by_gather(self, bucket: Bucket, data: Tensor) -> None:
        """Shards travel to all expert-parallel ranks and stages, then over tp or etp; each tensor is joined and the engine's part cut."""
        mine, axis = self._staged(bucket, data.device), self._axis(bucket)
        everyone = [mine]
        if axis.size > 1:
            joined = torch.empty(axis.size * mine.numel(), dtype=mine.dtype, device=mine.device)
            dist.all_gather_into_tensor(joined, mine, group=axis.group)
            everyone = list(joined.chunk(axis.size))
        for item in bucket.items:
            if item.entries:
                shards = [self._shard(item, flat) for flat in everyone]
                layout = expert_layout(item.row, self.plan.layout)
                self._write(item, engine_parts(item.row.kind, shards, self.shape, layout), data)

    def _axis(self, bucket: Bucket) -> Axis:
        return self.mesh.tp if bucket.way.axis == "tp" else self.mesh.etp

    def _staged(self, bucket: Bucket, device: torch.device) -> Tensor:
        flat = torch.empty(bucket.staging_nbytes, dtype=torch.uint8, device=device)
        if self._owns(bucket):
            for item in bucket.items:
                self._shard(item, flat).copy_(self.parameters[item.row.megatron])
        ep = self.mesh.ep
        if ep.size > 1 and bucket.way.owner != ANY and bucket.stage == self.mesh.pp.index:
            dist.broadcast(flat, ep.ranks[bucket.way.owner], group=ep.group)
        self._over_stages(bucket, flat)
        return flat

    def _over_stages(self, bucket: Bucket, data: Tensor) -> None:
        pp = self.mesh.pp
        if pp.size > 1 and data.numel():
            dist.broadcast(data, pp.ranks[bucket.stage], group=pp.group)

    def _shard(self, item: Item, flat: Tensor) -> Tensor:
        """A view of a staging buffer."""
        nbytes = math.prod(item.shard_shape) * item.dtype.itemsize
        return flat[item.staging_offset : item.staging_offset + nbytes].view(item.dtype).view(item.shard_shape)

    def _write(self, item: Item, parts: list[Tensor], data: Tensor) -> None:
        """Parts lie one after another, whether the engine calls them one tensor or several."""
        if len(item.entries) == len(parts):
            starts = [e.offset for e in item.entries]
        else:
            sizes = [p.numel() * item.dtype.itemsize for p in parts]
            starts = [item.entries[0].offset + sum(sizes[:i]) for i in range(len(parts))]
        for start, part in zip(starts, parts, strict=True):
            view = data[start : start + part.numel() * item.dtype.itemsize].view(item.dtype).view(part.shape)
            view.copy_(part)


def engine_parts(kind: Kind, shards: list[Tensor], shape: ModelShape, layout: Layout) -> list[Tensor]:
    """All Megatron shards of a parameter -> the parts that one engine worker stores."""
    full = kind.join(shards, shape)
    if isinstance(kind, Vocab):
        rows = shape.padded_vocab(1) if layout.fused else shape.vocab_size
        full = [pad_rows(full[0][:rows], rows)]
    return kind.engine_parts(full, layout.tp, layout.rank, shape)
