"""Context parallelism over packs: each rank holds two pieces of every sequence, and attention gathers the keys and values of all ranks.

A sequence of n tokens (a multiple of 2 cp) is cut into 2 cp pieces; rank r has pieces r and 2 cp - 1 - r, so that under a causal mask all
ranks do the same work ("zigzag", as in Megatron-core). A piece attends to all that is before it and, causally, to itself.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from torch import Tensor

from megaflow.parallel.mesh import Axis


@dataclass
class Context:
    """How a pack lies over the ranks of the context-parallel group.

    mine     [T/cp] int64: numbers of this rank's tokens in the whole pack
    keys     [K] int64: for each piece of this rank, the tokens that it may attend to, as places among the gathered ones
    pieces   (queries, keys) of each piece, in the order of `mine`
    """

    group: dist.ProcessGroup
    mine: Tensor
    keys: Tensor
    pieces: list[tuple[int, int]]

    @classmethod
    def of(cls, lengths: list[int], cp: Axis, device: torch.device) -> Context:
        orders = [_tokens_of(lengths, cp.size, rank) for rank in range(cp.size)]
        gathered = torch.cat(orders)
        place = torch.empty_like(gathered)
        place[gathered] = torch.arange(len(gathered))
        keys, pieces, start = [], [], 0
        for n in lengths:
            size = n // (2 * cp.size)
            for piece in (cp.index, 2 * cp.size - 1 - cp.index):
                end = (piece + 1) * size
                keys.append(place[start : start + end])
                pieces.append((size, end))
            start += n
        mine, all_keys = orders[cp.index], torch.cat(keys)
        return cls(cp.group, mine.to(device, non_blocking=True), all_keys.to(device, non_blocking=True), pieces)

    def gather_keys(self, x: Tensor) -> Tensor:
        """[T/cp, heads, d], this rank's -> [K, heads, d]: for each piece the keys (or values) that it may attend to."""
        return gather_from_sequence_parallel_region(x.contiguous(), group=self.group).index_select(0, self.keys)


def _tokens_of(lengths: list[int], cp: int, rank: int) -> Tensor:
    """Numbers of a rank's tokens in the whole pack."""
    parts, start = [], 0
    for n in lengths:
        size = n // (2 * cp)
        parts += [start + piece * size + torch.arange(size) for piece in (rank, 2 * cp - 1 - rank)]
        start += n
    return torch.cat(parts)


def whole_rows(local: Tensor, slots: Tensor, total: int, group: dist.ProcessGroup) -> Tensor:
    """[..., R of this rank] -> [..., R of the pack] on every rank of the group; `slots` are this rank's places in it.

    Every rank then computes the same loss from them, so the gradient of a row goes back to the rank that has it, and is not summed.
    """
    return _WholeRows.apply(local, slots, total, group)


class _WholeRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx, local, slots, total, group):
        ctx.save_for_backward(slots)
        whole = local.new_zeros(*local.shape[:-1], total)
        whole[..., slots] = local
        dist.all_reduce(whole, group=group)
        return whole

    @staticmethod
    def backward(ctx, grad):
        (slots,) = ctx.saved_tensors
        return grad[..., slots], None, None, None
