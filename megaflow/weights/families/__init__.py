"""Model families: what each one's config.json means, and how its tensors are called. A family is one file; docs/adding-a-model.md."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from megaflow.registry import Registry
from megaflow.shape import plain_attention


@dataclass(frozen=True)
class Names:
    """Hugging Face's names within a layer where families differ; `{e}` is the number of an expert."""

    router: str = "mlp.gate.weight"
    router_bias: str = "mlp.gate.e_score_correction_bias"
    expert: str = "mlp.experts.{e}."
    expert_parts: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")
    shared: str = "mlp.shared_expert."
    shared_gate: str = "mlp.shared_expert_gate.weight"


@dataclass(frozen=True)
class Family:
    """models   published models that it was checked for, for the documentation
    read     config.json -> the fields of ModelShape beside those that all families share
    refuse   config.json -> what would be silently wrong -> whether it is asked for
    """

    models: str
    read: Callable[[dict[str, Any]], dict[str, Any]]
    refuse: Callable[[dict[str, Any]], dict[str, bool]] = plain_attention
    names: Names = field(default_factory=Names)


FAMILIES = Registry("model family")
for _name in ("llama", "mistral", "qwen2", "qwen3", "qwen3_moe", "qwen2_moe", "mixtral", "deepseek_v3"):
    FAMILIES.register(_name, f"megaflow.weights.families.{_name}:FAMILY")
