"""Qwen2: Llama's layer with biases on q, k and v."""

from __future__ import annotations

from megaflow.shape import plain_attention
from megaflow.weights.families import Family

FAMILY = Family(
    models="Qwen2, Qwen2.5",
    read=lambda raw: {"qkv_bias": True},
    refuse=lambda raw: plain_attention({**raw, "attention_bias": False}),  # the key, where it is present, says what we do anyway
)
