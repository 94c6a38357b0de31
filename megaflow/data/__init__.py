"""Prompts: read from files or made procedurally, put into tokens, handed out in a saved order; and the packing of sequences.

Importing this package loads nothing else; its names are fetched on first use.
"""

from __future__ import annotations

import importlib
from typing import Any

_HOMES = {
    "load_tokenizer": "megaflow.data.prompts",
    "decoded": "megaflow.data.prompts",
    "PromptStream": "megaflow.data.stream",
    "split_balanced": "megaflow.data.packing",
    "pack_micro_batches": "megaflow.data.packing",
}
__all__ = list(_HOMES)


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)
