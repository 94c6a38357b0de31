"""Bytes that one forward pass leaves for the backward pass, of a rank: the packed Megatron layers of actor/, operation by operation.

Each line of `_dense` and `_attention` is one tensor that autograd holds on to; a tensor that two operations share counts once.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from megaflow.config.footprint import BYTES, layers_of_stage
from megaflow.config.schema import Config
from megaflow.shape import ModelShape

LOGITS_CHUNK = 1 << 30  # bytes: actor/logprob.py cuts the rows of the output head into chunks of this size
FP32, INT64 = 4, 8


@dataclass(frozen=True)
class Pack:
    """What one forward pass of a rank holds. tokens: before context parallelism divides them; rows: those that get logits."""

    tokens: int
    rows: int


class Activations:
    """Of one rank of a pipeline stage. All figures in bytes."""

    def __init__(self, config: Config, shape: ModelShape, stage: int = 0):
        self.config, self.shape, self.stage = config, shape, stage
        parallel = config.parallel
        self.size = BYTES[config.model.dtype]
        self.tp, self.sequence = parallel.tp, parallel.tp if parallel.sp else 1
        self.is_last = stage == parallel.pp - 1
        self.layers = layers_of_stage(shape, parallel, stage)
        self.recompute = config.actor.recompute == "full"

    # --- a token ------------------------------------------------------------------------------------------------

    def of_token(self) -> float:
        """Kept for the backward pass by this stage's layers, of one token of this rank."""
        return sum(self._checkpoint() if self.recompute else self.of_layer(layer) for layer in self.layers)

    def of_layer(self, layer: int) -> float:
        return self._attention() + (self._sparse() if self.shape.is_sparse(layer) else self._dense(self.shape.ffn_size))

    def _checkpoint(self) -> float:
        """recompute=full keeps a layer's input alone."""
        return self.shape.hidden_size * self.size / self.sequence

    def _attention(self) -> float:
        """Norm, projection, rotary, attention, output projection. Without sequence parallelism norms are computed on every rank."""
        s, h, b = self.shape, self.shape.hidden_size, self.size
        norm = (2 * h * b + FP32) / self.sequence  # its input (the residual stream) and 1 / rms; its output, which the projection keeps
        if s.latent is not None:
            return norm + self._latent()
        query, key = s.num_heads * s.head_dim, s.num_kv_heads * s.head_dim
        fused = (query + 2 * key) * b  # q, k, v as they come: v is a view of it, which keeps all of it alive
        rotated = (query + key) * b
        out = query * b + s.num_heads * FP32  # kept by the kernel, and the same tensor by the output projection; log-sum-exp of each row
        head_norms = ((query + key) * b + (s.num_heads + s.num_kv_heads) * FP32) if s.qk_norm else 0
        return norm + (fused + rotated + out + head_norms) / self.tp

    def _latent(self) -> float:
        """The compressions (whole on each rank, input and output of their norms), what they open to, and the kernel's padded values."""
        s, m, b = self.shape, self.shape.latent, self.size
        compressed = (2 * (m.q_rank or 0) + 2 * m.kv_rank + 2 * m.rope_dim) * b / self.sequence
        opened = s.num_heads * (2 * s.head_dim + m.nope_dim + m.value_dim) * b  # q, k; k and v as they come
        kernel = s.num_heads * (2 * s.head_dim * b + m.value_dim * b + FP32)  # padded values, output; output without the padding
        return compressed + (opened + kernel) / self.tp

    def _dense(self, ffn: int) -> float:
        h, b = self.shape.hidden_size, self.size
        return (2 * h * b + FP32) / self.sequence + 3 * ffn * b / self.tp  # norm; gate and up; their product

    def _sparse(self) -> float:
        """A token goes to top_k experts, so what the experts keep counts so many times; with even routing wherever they lie. A rank of an
        expert cut by etp sees the tokens of all etp ranks, and has 1 / etp of their width."""
        e, h, b = self.shape.experts, self.shape.hidden_size, self.size
        router = 3 * e.count * FP32 + e.count  # logits, scores, those of the chosen; which are chosen
        norm_and_router = (2 * h * b + FP32 + router) / self.sequence
        # the expert's input; gate and up, their product, and that times the router's weight; the weight and the token's place
        routed = e.top_k * (h * b * self.config.parallel.etp + 4 * e.ffn_size * b + FP32 + INT64) / self.sequence
        shared = 3 * e.shared_ffn_size * b / self.tp + h * b * e.shared_gate / self.sequence
        return norm_and_router + routed + shared

    # --- a pass -------------------------------------------------------------------------------------------------

    def update_peak(self, pack: Pack, kept_bytes: float, num_packs: int) -> float:
        """Most at once in forward and backward passes. kept_bytes: actor.logits_gb.

        Two moments compete: the end of the last forward pass, with all logits that are kept, and the backward pass of the first layer that
        it comes to, when the logits are gone.
        """
        tokens = pack.tokens / self.config.parallel.cp
        kept = self.in_flight(num_packs) * self.of_token() * tokens
        one_layer = max(self.of_layer(layer) for layer in self.layers) * tokens
        backward = kept + (one_layer if self.recompute else 0) + self._layer_gradients() * tokens + self._tied_placeholder()
        if not self.is_last:
            return max(kept + one_layer * self.recompute, backward)
        return max(kept + self.head(pack, kept_bytes), backward + self._final_norm() * tokens)

    def forward_peak(self, pack: Pack) -> float:
        """Most at once in a pass without gradients: a layer's widest moment, or two chunks of logits (one is made before the last goes)."""
        tokens, h, b = pack.tokens / self.config.parallel.cp, self.shape.hidden_size, self.size
        ffn = max(self._ffn_width(layer) for layer in self.layers)
        layer = (2 * h * b / self.sequence + 3 * ffn * b / self.tp) * tokens
        return max(layer, self.head(pack, 0.0)) if self.is_last else layer

    def head(self, pack: Pack, kept_bytes: float) -> float:
        """Final norm, rows that predict, logits kept, and the chunks in the making."""
        rows, tokens = pack.rows / self.config.parallel.cp, pack.tokens / self.config.parallel.cp
        gathered = tokens * self.shape.hidden_size * self.size if self.sequence > 1 else 0
        hidden = self._final_norm() * tokens + gathered + rows * self.shape.hidden_size * self.size
        return hidden + self.logits(rows, kept_bytes)

    def logits(self, rows: float, kept_bytes: float) -> float:
        """16-bit (or fp32) logits of as many chunks as fit `kept_bytes`; of the others two at once."""
        each = self.shape.padded_vocab(self.tp) / self.tp * self.size
        number = max(1, math.ceil(rows * each / LOGITS_CHUNK))
        chunk = rows * each / number
        kept = min(number, int(kept_bytes // chunk)) if chunk else 0
        return kept * chunk + min(2, number - kept) * chunk

    def in_flight(self, num_packs: int) -> float:
        """Packs whose activations this stage holds at once, of Megatron's one-forward-one-backward schedule (Narayanan et al. 2021, section
        2.2). With vpp chunks its first stage warms up with 2 (pp - 1) + (vpp - 1) pp chunks, of which each is 1 / vpp of a stage."""
        pp, vpp = self.config.parallel.pp, self.config.parallel.vpp
        if vpp > 1:
            return min(num_packs, (2 * (pp - 1 - self.stage) + (vpp - 1) * pp + 1) / vpp)
        return min(num_packs, pp - self.stage)

    def _final_norm(self) -> float:
        return (2 * self.shape.hidden_size * self.size + FP32) / self.sequence

    def _ffn_width(self, layer: int) -> float:
        e = self.shape.experts
        return e.top_k * e.ffn_size + e.shared_ffn_size if self.shape.is_sparse(layer) else self.shape.ffn_size

    def _layer_gradients(self) -> float:
        """Gradients of gate and up, of their product, and of the residual stream (twice, where it branches)."""
        ffn = max(self._ffn_width(layer) for layer in self.layers)
        return 3 * ffn * self.size / self.tp + 2 * self.shape.hidden_size * self.size

    def _tied_placeholder(self) -> float:
        """Where the embedding is the output layer too, autograd holds the head's part of its gradient until the embedding's comes."""
        is_tied = self.shape.tied and self.config.parallel.pp == 1
        return self.shape.padded_vocab(self.tp) / self.tp * self.shape.hidden_size * self.size if is_tied else 0.0
