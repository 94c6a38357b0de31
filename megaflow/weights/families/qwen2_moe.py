"""Qwen2-MoE: Qwen2's attention, Qwen3-MoE's experts, and one shared expert behind a gate of its own."""

from __future__ import annotations

from typing import Any

from megaflow.shape import plain_attention
from megaflow.weights.families import Family
from megaflow.weights.families.qwen3_moe import experts


def read(raw: dict[str, Any]) -> dict[str, Any]:
    return {
        "qkv_bias": bool(raw.get("qkv_bias", True)),
        "experts": experts(raw, shared_ffn_size=raw["shared_expert_intermediate_size"], shared_gate=True),
    }


FAMILY = Family(
    models="Qwen1.5-MoE-A2.7B, Qwen2-57B-A14B",
    read=read,
    refuse=lambda raw: plain_attention({**raw, "attention_bias": False}),
)
