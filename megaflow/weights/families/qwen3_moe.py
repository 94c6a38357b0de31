"""Qwen3-MoE: Qwen3's attention; layers route to experts, except those that `mlp_only_layers` and `decoder_sparse_step` leave out."""

from __future__ import annotations

from typing import Any

from megaflow.shape import Experts
from megaflow.weights.families import Family


def sparse_layers(raw: dict[str, Any]) -> tuple[bool, ...]:
    """[L] As transformers' Qwen2Moe and Qwen3Moe decide it."""
    step, dense = raw.get("decoder_sparse_step", 1), raw.get("mlp_only_layers") or []
    return tuple(i not in dense and (i + 1) % step == 0 for i in range(raw["num_hidden_layers"]))


def experts(raw: dict[str, Any], **more: Any) -> Experts:
    return Experts(
        count=raw["num_experts"] if "num_experts" in raw else raw["num_local_experts"],  # transformers 5 writes the second for Qwen3
        top_k=raw["num_experts_per_tok"],
        ffn_size=raw["moe_intermediate_size"],
        layers=sparse_layers(raw),
        normalize=bool(raw.get("norm_topk_prob", False)),
        **more,
    )


FAMILY = Family(models="Qwen3-30B-A3B, Qwen3-235B-A22B", read=lambda raw: {"qk_norm": True, "experts": experts(raw)})
