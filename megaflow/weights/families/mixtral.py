"""Mixtral: Mistral's layer with experts in place of the MLP; the weights of the chosen ones sum to 1."""

from __future__ import annotations

from typing import Any

from megaflow.shape import Experts
from megaflow.weights.families import Family, Names


def read(raw: dict[str, Any]) -> dict[str, Any]:
    experts = Experts(
        count=raw["num_local_experts"],
        top_k=raw["num_experts_per_tok"],
        ffn_size=raw["intermediate_size"],
        layers=(True,) * raw["num_hidden_layers"],
    )
    return {"experts": experts}


FAMILY = Family(
    models="Mixtral-8x7B, Mixtral-8x22B",
    read=read,
    names=Names(router="block_sparse_moe.gate.weight", expert="block_sparse_moe.experts.{e}.", expert_parts=("w1", "w3", "w2")),
)
