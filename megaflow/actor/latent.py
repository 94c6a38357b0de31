"""Multi-head latent attention (DeepSeek-V2, section 2.1) over packed sequences, without Transformer Engine."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.tensor_parallel import (
    copy_to_tensor_model_parallel_region,
    gather_from_tensor_model_parallel_region,
    scatter_to_sequence_parallel_region,
)
from megatron.core.transformer.multi_latent_attention import MLASelfAttention
from torch import Tensor

from megaflow.actor.modules import PackedAttention, PackedRotary
from megaflow.actor.packing import Packed
from megaflow.shape import ModelShape

NORM_EPS = 1e-6  # of the two norms on compressed q and kv: transformers fixes it, whatever the config says of the others


def latent_settings(shape: ModelShape) -> dict[str, Any]:
    """Fields of MLATransformerConfig. The rotary module is ours; what Megatron computes of these is the scale of the softmax."""
    m, rope = shape.latent, shape.rope_scaling
    yarn = rope["rope_type"] == "yarn"
    return {
        "multi_latent_attention": True,
        "q_lora_rank": m.q_rank,
        "kv_lora_rank": m.kv_rank,
        "qk_head_dim": m.nope_dim,
        "qk_pos_emb_head_dim": m.rope_dim,
        "v_head_dim": m.value_dim,
        "rope_type": "rope",
        "rotary_scaling_factor": rope["factor"] if yarn else 1.0,
        "mscale_all_dim": (rope.get("mscale_all_dim") or 0.0) if yarn else 0.0,
    }


class LatentAttention(MLASelfAttention):
    """Megatron's, with its rotary module replaced by one that looks angles up by position, and one gradient mended."""

    def __init__(self, *args, rotary: LatentRotary, **kwargs):
        super().__init__(*args, **kwargs)
        self.rotary_pos_emb = rotary
        for norm in (getattr(self, "q_layernorm", None), self.kv_layernorm):
            if norm is not None:
                norm.eps = NORM_EPS

    def _qkv_down_projection(self, hidden_states: Tensor) -> tuple[Tensor, Tensor]:
        """Every rank's heads use the rotary part of k, so its gradient is the sum over tp. Without Transformer Engine megatron-core
        0.19.2 gathers that part in a way whose backward pass keeps only this rank's heads'."""
        q, kv = super()._qkv_down_projection(hidden_states)
        if kv.shape[-1] == self.config.kv_lora_rank + self.config.qk_pos_emb_head_dim:
            return q, kv
        kv = gather_from_tensor_model_parallel_region(kv)
        if self.config.sequence_parallel:
            return q, scatter_to_sequence_parallel_region(kv)  # the gather that follows sums over tp in its backward pass
        content, position = kv.split([self.config.kv_lora_rank, self.config.qk_pos_emb_head_dim], -1)
        return q, torch.cat([content, copy_to_tensor_model_parallel_region(position)], -1)


class LatentRotary(PackedRotary):
    """PackedRotary for a part of the head, [T, 1, dim] as latent attention drops the batch axis of a pack.

    With yarn, cos and sin may be multiplied by a factor, which angles cannot carry; the published models set its two mscale equal, so
    that it is 1. Others are refused when the model is read.
    """

    def forward(self, packed: Packed, packed_seq: bool = False, cp_group=None) -> Tensor:
        return torch.cat([self.angles, self.angles], -1)[packed.positions][:, None]


class LatentPackedAttention(PackedAttention):
    """PackedAttention whose values are shorter than its keys."""

    def forward(self, query, key, value, *args, **kwargs):
        """query, key [T, heads, d], value [T, heads, value_dim] -> [T, 1, heads * value_dim]"""
        return super().forward(*(x.unsqueeze(1) for x in (query, key, value)), *args, **kwargs)

    def _varlen(self, q, k, v, packed: Packed) -> Tensor:
        """The kernel wants equal dims: zeros are added to v and cut off again."""
        out = super()._varlen(q, k, F.pad(v, [0, q.shape[-1] - v.shape[-1]]), packed)
        return out[..., : v.shape[-1]]

