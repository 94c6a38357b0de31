"""What a sequence costs in matrix products: a part that grows with its length and, from attention, one that grows with the square."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from megaflow.data.packing import split_balanced
from megaflow.shape import ModelShape


@dataclass(frozen=True)
class SequenceCost:
    """Floating-point operations of one forward pass, a multiplication and an addition counted as two: linear * L + quadratic * L^2.

    linear     2 for each weight of a matrix that a token meets (of experts: the chosen ones), the output head not counted
    quadratic  the causal half of q k^T and of p v: each 2 * heads * dim * L^2 / 2, in every layer
    head       2 for each weight of the output head, for each row that gets logits
    """

    linear: int
    quadratic: int
    head: int

    @classmethod
    def of(cls, shape: ModelShape) -> SequenceCost:
        weights = sum(_weights_met(shape, layer) for layer in range(shape.num_layers))
        dims = shape.head_dim + (shape.head_dim if shape.latent is None else shape.latent.value_dim)
        return cls(2 * weights, shape.num_layers * shape.num_heads * dims, 2 * shape.vocab_size * shape.hidden_size)

    def forward(self, length: int, rows: int = 0) -> int:
        """rows: how many of its tokens get logits."""
        return self.linear * length + self.quadratic * length * length + self.head * rows

    def balanced(self, lengths: list[int], bins: int) -> list[list[int]]:
        """split_balanced by cost instead of by length; every token counts as one with logits."""
        return split_balanced([self.forward(n, n) for n in lengths], bins)

    @property
    def of_length(self) -> Callable[[int], int]:
        return lambda length: self.forward(length, length)


def _weights_met(shape: ModelShape, layer: int) -> int:
    """Weights of matrices that one token is multiplied with in a layer."""
    h, d, m, e = shape.hidden_size, shape.head_dim, shape.latent, shape.experts
    if m is None:
        attention = h * d * (shape.num_heads + 2 * shape.num_kv_heads) + shape.num_heads * d * h
    else:
        query = h * shape.num_heads * d if m.q_rank is None else m.q_rank * (h + shape.num_heads * d)
        attention = query + h * (m.kv_rank + m.rope_dim) + m.kv_rank * shape.num_heads * (m.nope_dim + m.value_dim)
        attention += shape.num_heads * m.value_dim * h
    if not shape.is_sparse(layer):
        return attention + 3 * h * shape.ffn_size
    return attention + e.count * h + 3 * h * (e.top_k * e.ffn_size + e.shared_ffn_size)


def flops(shape: ModelShape, lengths: Sequence[int], rows: Sequence[int], with_head: bool = True) -> int:
    """Of a forward pass over sequences of these lengths, of which so many rows get logits. A training step is three times that."""
    cost = SequenceCost.of(shape)
    return sum(cost.forward(n, r if with_head else 0) for n, r in zip(lengths, rows, strict=True))
