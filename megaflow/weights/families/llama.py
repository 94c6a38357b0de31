"""Llama: the layer that every other family here is a variation of."""

from __future__ import annotations

from megaflow.weights.families import Family

FAMILY = Family(models="Llama 2 and 3 (with rope scaling), SmolLM2", read=lambda raw: {})
