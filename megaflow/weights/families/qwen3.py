"""Qwen3: Llama's layer with a norm on each head's q and k, and a head dimension of its own."""

from __future__ import annotations

from megaflow.weights.families import Family

FAMILY = Family(models="Qwen3", read=lambda raw: {"qk_norm": True})
