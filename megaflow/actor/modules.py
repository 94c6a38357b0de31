"""Modules that megatron-core has only with Transformer Engine or apex: norm for sequence parallelism, SwiGLU, packed attention, rotary."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.transformer.module import MegatronModule
from torch import Tensor

from megaflow.actor.fused import rms_norm, rotary, swiglu
from megaflow.actor.packing import Packed


class RMSNorm(torch.nn.Module):
    """RMSNorm whose weight says that sequence parallelism splits its input:

    without the attribute Megatron does not sum its gradient over tp, which is silently wrong.
    """

    def __init__(self, config, hidden_size: int, eps: float = 1e-5, fused: bool = False, **_):
        super().__init__()
        self.eps, self.fused = eps, fused
        self.weight = torch.nn.Parameter(torch.ones(hidden_size, dtype=config.params_dtype, device=torch.cuda.current_device()))
        self.weight.sequence_parallel = config.sequence_parallel

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.weight, self.eps, self.fused)


class SwiGLU(torch.nn.Module):
    """Megatron's MLP takes its activation as a module only where it expects Transformer Engine's (`use_te_activation_func`)."""

    def __init__(self, config, fused: bool = False):
        super().__init__()
        self.fused = fused

    def forward(self, x: Tensor) -> Tensor:
        return swiglu(x, self.fused)


class PackedRotary(torch.nn.Module):
    """Angles of each position, and their cos and sin [P, dim / 2] fp32. Stands in for Megatron's module in GPTModel.

    dim: head dimension; base: theta of RoFormer (Su et al. 2021, eq. 15); scaling: as in config.json, see `inverse_frequencies`
    """

    def __init__(self, dim: int, base: float, max_positions: int, device: torch.device, scaling: dict[str, Any]):
        super().__init__()
        inverse = inverse_frequencies(dim, base, scaling).to(device)
        self.angles = torch.outer(torch.arange(max_positions, dtype=torch.float32, device=device), inverse)  # [P, dim / 2]
        self.cos, self.sin = self.angles.cos(), self.angles.sin()  # no buffers: a 16-bit model would round them

    def get_rotary_seq_len(self, inference_context, decoder, decoder_input, config, packed: Packed) -> Packed:
        return packed

    def forward(self, packed: Packed, packed_seq: bool = False, cp_group=None) -> None:
        """Nothing for Megatron's attention layers, which would take the cosines of every token anew in each: PackedAttention rotates."""


def inverse_frequencies(dim: int, base: float, scaling: dict[str, Any]) -> Tensor:
    """[dim / 2] fp32, radians a position. rope_type default; linear (Chen et al. 2023: positions divided by `factor`); llama3 (Llama 3.1's
    published code: long wavelengths divided by `factor`, short ones kept, those between interpolated); yarn (Peng et al. 2023, eq. 23)."""
    inverse = 1.0 / (base ** (torch.arange(0, dim, 2, dtype=torch.float32) / dim))
    if scaling["rope_type"] == "default":
        return inverse
    factor = scaling["factor"]
    if scaling["rope_type"] == "linear":
        return inverse / factor
    if scaling["rope_type"] == "yarn":
        kept = _yarn_kept(dim, base, scaling)
        return inverse * kept + inverse / factor * (1 - kept)
    assert scaling["rope_type"] == "llama3", scaling
    turns = scaling["original_max_position_embeddings"] * inverse / (2 * math.pi)  # full turns within the original context
    low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
    kept = ((turns - low) / (high - low)).clamp(0, 1)
    return inverse * kept + inverse / factor * (1 - kept)


def _yarn_kept(dim: int, base: float, scaling: dict[str, Any]) -> Tensor:
    """[dim / 2] part of each frequency that stays as it is: 1 above beta_fast turns within the original context, 0 below beta_slow."""

    def index_of(turns: float) -> float:
        return dim * math.log(scaling["original_max_position_embeddings"] / (turns * 2 * math.pi)) / (2 * math.log(base))

    low, high = index_of(scaling.get("beta_fast") or 32), index_of(scaling.get("beta_slow") or 1)
    if scaling.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    ramp = (torch.arange(dim // 2, dtype=torch.float32) - low) / max(high - low, 0.001)
    return 1 - ramp.clamp(0, 1)


class PackedAttention(MegatronModule):
    """Rotary embedding and causal attention within each sequence of a pack; grouped queries without repeating keys.

    On CUDA in 16 bit: torch's varlen flash attention. Otherwise: scaled_dot_product_attention over sequences of like length at once.
    """

    def __init__(self, config, layer_number, attn_mask_type, attention_type, rotary: PackedRotary | None = None,
                 softmax_scale=None, kernel: str = "auto", fused: bool = False, **_):  # fmt: skip
        """kernel: `model.attention`: varlen, sdpa, or auto. rotary: None where q and k come rotated. fused: its kernel."""
        super().__init__(config=config)
        self.kernel, self.rotary, self.fused = kernel, rotary, fused
        self.scale = softmax_scale or 1 / math.sqrt(config.kv_channels)

    def forward(self, query, key, value, attention_mask=None, attn_mask_type=None, attention_bias=None, packed_seq_params=None, **_):
        """query [T, 1, heads, d]; key, value [T, 1, kv_heads, d] -> [T, 1, heads * d]  (megatron)"""
        q, k, v = (x.squeeze(1) for x in (query, key, value))
        if self.rotary is not None:
            q, k = (rotary(x, packed_seq_params.positions, self.rotary.cos, self.rotary.sin, self.fused) for x in (q, k))
        use_varlen = self.kernel == "varlen" or (self.kernel == "auto" and q.is_cuda and q.dtype != torch.float32)
        attend = self._varlen if use_varlen else self._by_length
        if packed_seq_params.context is not None:
            k, v = (packed_seq_params.context.gather_keys(x) for x in (k, v))
            attend = self._varlen if use_varlen else self._by_piece
        return attend(q, k, v, packed_seq_params).reshape(query.shape[0], 1, -1)

    def _varlen(self, q, k, v, packed: Packed) -> Tensor:
        from torch.nn.attention.varlen import varlen_attn

        bounds = packed.cu_seqlens_q, packed.cu_seqlens_kv, packed.max_seqlen_q, packed.max_seqlen_kv
        # a window of (-1, 0) is what torch 2.11 calls causal; of fewer queries than keys the last ones are at the same place
        return varlen_attn(q, k, v, *bounds, scale=self.scale, window_size=(-1, 0))

    def _by_length(self, q, k, v, packed: Packed) -> Tensor:
        """Padding is on the right, so a causal mask hides it; length classes are powers of two: at most half is padding."""
        classes: dict[int, list[tuple[int, int]]] = {}
        start = 0
        for n in packed.lengths:
            classes.setdefault((n - 1).bit_length(), []).append((start, n))
            start += n
        out = q.new_empty(*q.shape[:2], v.shape[-1])
        parts, places = [], []
        for members in classes.values():
            index, real = _padded_index(members, q.device)
            y = self._sdpa(*(x[index] for x in (q, k, v)))  # [B, S, heads, d]
            parts.append(y[real])
            places.append(index[real])
        return out.index_copy(0, torch.cat(places), torch.cat(parts))

    def _by_piece(self, q, k, v, packed: Packed) -> Tensor:
        """Pieces of sequences, see context.py: the last query of each is at the place of its last key."""
        sizes = list(zip(*packed.context.pieces, strict=True))
        parts = zip(q.split(sizes[0]), k.split(sizes[1]), v.split(sizes[1]), strict=True)
        return torch.cat([self._sdpa(*(x[None] for x in part))[0] for part in parts])

    def _sdpa(self, q, k, v) -> Tensor:
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))  # [B, heads, S, d]
        more = k.shape[2] - q.shape[2]  # keys before the first query
        seen = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool, device=q.device).tril(more) if more else None
        y = F.scaled_dot_product_attention(
            q, k, v, attn_mask=seen, is_causal=seen is None, scale=self.scale, enable_gqa=q.shape[1] != k.shape[1]
        )
        return y.transpose(1, 2)


def _padded_index(members: list[tuple[int, int]], device) -> tuple[Tensor, Tensor]:
    """(start, length) of sequences -> their token numbers [B, S], padded with the last one's, and which of them are real [B, S] bool."""
    starts, lengths = torch.tensor(members, device=device).unbind(1)
    offsets = torch.arange(int(max(n for _, n in members)), device=device)
    real = offsets < lengths[:, None]
    return starts[:, None] + torch.minimum(offsets, lengths[:, None] - 1), real
