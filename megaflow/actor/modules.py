"""Modules that megatron-core has only with Transformer Engine or apex: a norm for sequence parallelism, packed attention and rotary."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.transformer.module import MegatronModule
from torch import Tensor

from megaflow.actor.packing import Packed


class RMSNorm(torch.nn.Module):
    """RMSNorm (Zhang & Sennrich 2019) whose weight says that sequence parallelism splits its input:

    without the attribute Megatron does not sum its gradient over tp, which is silently wrong.
    """

    def __init__(self, config, hidden_size: int, eps: float = 1e-5, **_):
        super().__init__()
        self.eps = eps
        self.weight = torch.nn.Parameter(torch.ones(hidden_size, dtype=config.params_dtype, device=torch.cuda.current_device()))
        self.weight.sequence_parallel = config.sequence_parallel

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, (x.shape[-1],), self.weight, self.eps)


class PackedRotary(torch.nn.Module):
    """Rotary frequencies looked up by each token's position. Stands in for Megatron's module in GPTModel.

    dim: head dimension; base: theta of RoFormer (Su et al. 2021, eq. 15); scaling: as in config.json, see `inverse_frequencies`
    """

    def __init__(self, dim: int, base: float, max_positions: int, device: torch.device, scaling: dict[str, Any]):
        super().__init__()
        inverse = inverse_frequencies(dim, base, scaling).to(device)
        half = torch.outer(torch.arange(max_positions, dtype=torch.float32, device=device), inverse)
        self.angles = torch.cat([half, half], -1)[:, None, None]  # [P, 1, 1, dim]; no buffer: a 16-bit model would round it

    def get_rotary_seq_len(self, inference_context, decoder, decoder_input, config, packed: Packed) -> Packed:
        return packed

    def forward(self, packed: Packed, packed_seq: bool = False, cp_group=None) -> Tensor:
        return self.angles[packed.positions]  # [T, 1, 1, dim]


def inverse_frequencies(dim: int, base: float, scaling: dict[str, Any]) -> Tensor:
    """[dim / 2] fp32, radians a position. rope_type default; linear (Chen et al. 2023: positions divided by `factor`); llama3 (Llama 3.1's
    published code: long wavelengths divided by `factor`, short ones kept, those between interpolated)."""
    inverse = 1.0 / (base ** (torch.arange(0, dim, 2, dtype=torch.float32) / dim))
    if scaling["rope_type"] == "default":
        return inverse
    factor = scaling["factor"]
    if scaling["rope_type"] == "linear":
        return inverse / factor
    assert scaling["rope_type"] == "llama3", scaling
    turns = scaling["original_max_position_embeddings"] * inverse / (2 * math.pi)  # full turns within the original context
    low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
    kept = ((turns - low) / (high - low)).clamp(0, 1)
    return inverse * kept + inverse / factor * (1 - kept)


class PackedAttention(MegatronModule):
    """Causal attention within each sequence of a pack; grouped queries without repeating keys.

    On CUDA in 16 bit: torch's varlen flash attention. Otherwise: scaled_dot_product_attention over sequences of like length at once.
    """

    def __init__(
        self, config, layer_number, attn_mask_type, attention_type, attention_dropout=None, softmax_scale=None, kernel: str = "auto", **_
    ):
        """kernel: `model.attention`: varlen, sdpa, or auto."""
        super().__init__(config=config)
        self.kernel = kernel
        self.scale = softmax_scale or 1 / math.sqrt(config.kv_channels)

    def forward(self, query, key, value, attention_mask=None, attn_mask_type=None, attention_bias=None, packed_seq_params=None, **_):
        """query [T, 1, heads, d]; key, value [T, 1, kv_heads, d] -> [T, 1, heads * d]  (megatron)"""
        q, k, v = (x.squeeze(1) for x in (query, key, value))
        use_varlen = self.kernel == "varlen" or (self.kernel == "auto" and q.is_cuda and q.dtype != torch.float32)
        attend = self._varlen if use_varlen else self._by_length
        return attend(q, k, v, packed_seq_params).reshape(query.shape[0], 1, -1)

    def _varlen(self, q, k, v, packed: Packed) -> Tensor:
        from torch.nn.attention.varlen import varlen_attn

        bounds, longest = packed.cu_seqlens_q, packed.max_seqlen_q
        # a window of (-1, 0) is what torch 2.11 calls causal
        return varlen_attn(q, k, v, bounds, bounds, longest, longest, scale=self.scale, window_size=(-1, 0))

    def _by_length(self, q, k, v, packed: Packed) -> Tensor:
        """Padding is on the right, so a causal mask hides it; length classes are powers of two: at most half is padding."""
        classes: dict[int, list[tuple[int, int]]] = {}
        start = 0
        for n in packed.lengths:
            classes.setdefault((n - 1).bit_length(), []).append((start, n))
            start += n
        out = torch.empty_like(q)
        parts, places = [], []
        for members in classes.values():
            index, real = _padded_index(members, q.device)
            y = self._sdpa(*(x[index] for x in (q, k, v)))  # [B, S, heads, d]
            parts.append(y[real])
            places.append(index[real])
        return out.index_copy(0, torch.cat(places), torch.cat(parts))

    def _sdpa(self, q, k, v) -> Tensor:
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))  # [B, heads, S, d]
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=self.scale, enable_gqa=q.shape[1] != k.shape[1])
        return y.transpose(1, 2)


def _padded_index(members: list[tuple[int, int]], device) -> tuple[Tensor, Tensor]:
    """(start, length) of sequences -> their token numbers [B, S], padded with the last one's, and which of them are real [B, S] bool."""
    starts, lengths = torch.tensor(members, device=device).unbind(1)
    offsets = torch.arange(int(max(n for _, n in members)), device=device)
    real = offsets < lengths[:, None]
    return starts[:, None] + torch.minimum(offsets, lengths[:, None] - 1), real
