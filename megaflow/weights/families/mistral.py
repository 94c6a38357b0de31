"""Mistral: Llama's layer; a sliding window shorter than the context is refused."""

from __future__ import annotations

from megaflow.weights.families import Family

FAMILY = Family(models="Mistral 7B v0.2 and later", read=lambda raw: {})
