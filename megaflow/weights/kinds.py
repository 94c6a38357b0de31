"""The kinds of parameter: how the full Hugging Face tensors of one relate to Megatron's tensor-parallel shards.

Each kind is exact both ways: `join([split(hf, tp, r) for r in range(tp)])` gives the same bits back. dim 0 of a weight is its output.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from megaflow.shape import ModelShape


@dataclass(frozen=True)
class Kind:
    """One full tensor, cut along `dim`; None: every rank has the whole."""

    dim: int | None = None

    def split(self, hf: list[Tensor], tp: int, rank: int, shape: ModelShape) -> Tensor:
        """Hugging Face tensors -> the Megatron shard of `rank`."""
        return self.cut(hf[0], tp, rank)

    def join(self, shards: list[Tensor], shape: ModelShape) -> list[Tensor]:
        """All Megatron shards, in order -> Hugging Face tensors. With one of tp shards: that rank's part of each."""
        return [shards[0] if self.dim is None or len(shards) == 1 else torch.cat(shards, self.dim)]

    def cut(self, full: Tensor, tp: int, rank: int) -> Tensor:
        """Part `rank` of `tp` of a full tensor."""
        if self.dim is None or tp == 1:
            return full
        return full.chunk(tp, self.dim)[rank]

    def engine_parts(self, hf: list[Tensor], tp: int, rank: int, shape: ModelShape) -> list[Tensor]:
        """What worker `rank` of an engine of `tp` stores of each Hugging Face tensor."""
        return [self.cut(t, tp, rank) for t in hf]


@dataclass(frozen=True)
class Vocab(Kind):
    """Embedding or output layer, [V, H]: rows padded with zeros to a multiple of 64."""

    dim: int | None = 0

    def split(self, hf, tp, rank, shape):
        return self.cut(pad_rows(hf[0], shape.padded_vocab(tp)), tp, rank)


@dataclass(frozen=True)
class QKV(Kind):
    """q, k, v in one tensor, by key-value head: the query heads that share it, then k, then v. Weight [., H] or bias [.]."""

    dim: int | None = 0

    def split(self, hf, tp, rank, shape):
        groups = shape.num_kv_heads
        by_group = [t.reshape(groups, -1, *t.shape[1:]) for t in hf]
        return self.cut(torch.cat(by_group, 1), tp, rank).reshape(-1, *hf[0].shape[1:])

    def join(self, shards, shape):
        fused = shards[0] if len(shards) == 1 else torch.cat(shards)
        d, per_group = shape.head_dim, shape.num_heads // shape.num_kv_heads
        by_group = fused.reshape(-1, (per_group + 2) * d, *fused.shape[1:])
        return [t.reshape(-1, *fused.shape[1:]) for t in by_group.split([per_group * d, d, d], 1)]


    def engine_parts(self, hf, tp, rank, shape):
        """With more workers than key-value heads, several workers hold the same head."""
        q, *kv = hf
        heads = min(tp, shape.num_kv_heads)
        return [self.cut(q, tp, rank), *(self.cut(t, heads, rank * heads // tp) for t in kv)]


@dataclass(frozen=True)
class Gated(Kind):
    """gate and up of a SwiGLU: each rank has its part of gate, then its part of up."""

    dim: int | None = 0

    def split(self, hf, tp, rank, shape):
        return torch.cat([self.cut(t, tp, rank) for t in hf])

    def join(self, shards, shape):
        halves = [s.chunk(2) for s in shards]
        return [torch.cat(parts) if len(parts) > 1 else parts[0] for parts in zip(*halves, strict=True)]


@dataclass(frozen=True)
class Compressed(Kind):
    """The compressions of latent attention: cut by rows in Megatron, whole in every engine worker."""

    dim: int | None = 0

    def engine_parts(self, hf, tp, rank, shape):
        return hf


REPLICATED, COLUMN, ROW = Kind(), Kind(0), Kind(1)
VOCAB, QKV_ROWS, GATED, COMPRESSED = Vocab(), QKV(), Gated(), Compressed()


def pad_rows(t: Tensor, rows: int) -> Tensor:
    return torch.cat([t, t.new_zeros(rows - t.shape[0], *t.shape[1:])]) if rows > t.shape[0] else t
