"""Whole tensors of a model that lies over many ranks, one after another: for export and for comparison. A sync moves far less."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import Tensor

from megaflow.parallel.mesh import Mesh
from megaflow.shape import ModelShape
from megaflow.weights.kinds import Vocab
from megaflow.weights.table import Row, table


@torch.no_grad()
def full_tensors(
    shape: ModelShape, parameters: dict[str, Tensor], mesh: Mesh, dtype: torch.dtype, vpp: int = 1
) -> Iterator[tuple[str, Tensor]]:
    """Collective. Every tensor under its Hugging Face name, on every rank, in forward order; nobody holds more than one parameter.

    parameters   global Megatron name -> this rank's shard
    vpp          virtual chunks of a pipeline stage
    """
    places = mesh.all_gather((mesh.pp.index, mesh.ep.index))
    for row in table(shape):
        owner = _owner(row, shape, mesh, places, vpp)
        mine = parameters.get(row.megatron)  # a tied embedding's copy has another name, so this is None where the owner's stage is not
        full = [] if mine is None else _joined(row, mine.detach(), shape, mesh)
        wanted = torch.float32 if row.fp32 else dtype
        for i, (name, size) in enumerate(zip(row.hf, row.sizes, strict=True)):
            tensor = full[i].to(wanted).contiguous() if full else torch.empty(size, dtype=wanted, device=_device(parameters))
            dist.broadcast(tensor, owner)
            yield name, tensor


def _owner(row: Row, shape: ModelShape, mesh: Mesh, places: list[tuple[int, int]], vpp: int) -> int:
    """The lowest rank that has a shard of it."""
    stage = row.stage(mesh.pp.size, shape.num_layers, vpp)
    expert = row.expert * mesh.ep.size // shape.experts.count if row.expert >= 0 else None
    return next(r for r, (pp, ep) in enumerate(places) if pp == stage and (expert is None or ep == expert))


def _joined(row: Row, shard: Tensor, shape: ModelShape, mesh: Mesh) -> list[Tensor]:
    """Collective over the ranks that cut the parameter. Its Hugging Face tensors, without padding."""
    axis = mesh.tp if row.expert < 0 else mesh.etp
    shards = [shard]
    if axis.size > 1 and row.kind.dim is not None:
        shards = [torch.empty_like(shard, memory_format=torch.contiguous_format) for _ in range(axis.size)]
        dist.all_gather(shards, shard.contiguous(), group=axis.group)
    full = row.kind.join(shards, shape)
    return [full[0][: shape.vocab_size]] if isinstance(row.kind, Vocab) else full


def _device(parameters: dict[str, Tensor]) -> torch.device:
    return next(iter(parameters.values())).device
