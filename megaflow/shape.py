"""What a Hugging Face folder's config.json says of a model: its family and its sizes. Reads JSON only, so that it answers at once."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megaflow.types import PreflightError

FAMILIES = ("llama", "mistral", "qwen2", "qwen3")
ROPE_TYPES = ("default", "linear", "llama3")
VOCAB_MULTIPLE = 64  # SGLang pads the vocabulary to a multiple of 64; the same rows on both sides make its transfer a plain copy


@dataclass(frozen=True)
class ModelShape:
    """Sizes of a dense decoder; head_dim is given, not derived, since Qwen3 chooses it freely."""

    family: str
    num_layers: int
    hidden_size: int
    ffn_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    max_positions: int
    norm_eps: float
    rope_theta: float
    tied: bool
    qkv_bias: bool
    qk_norm: bool
    rope_scaling: dict[str, Any] = field(default_factory=lambda: {"rope_type": "default"})  # as in config.json

    def padded_vocab(self, tp: int) -> int:
        """Rows of the embedding over all tp ranks, V rounded up."""
        multiple = math.lcm(VOCAB_MULTIPLE, tp)
        return math.ceil(self.vocab_size / multiple) * multiple

    @property
    def num_parameters(self) -> int:
        """Without padding."""
        h, d = self.hidden_size, self.head_dim
        qkv = (self.num_heads + 2 * self.num_kv_heads) * d
        layer = qkv * h + self.num_heads * d * h + 3 * h * self.ffn_size + 2 * h
        layer += (qkv if self.qkv_bias else 0) + (2 * d if self.qk_norm else 0)
        return self.num_layers * layer + h + self.vocab_size * h * (1 if self.tied else 2)


def read_shape(folder: str | Path) -> ModelShape:
    """Raises PreflightError when the folder or its config.json is missing, broken, or of a family that is not supported."""
    path = Path(folder) / "config.json"
    if not path.is_file():
        raise PreflightError(f"model.path={folder}: no config.json there; give a Hugging Face folder (config.json, safetensors, tokenizer)")
    try:
        raw = json.loads(path.read_text())
    except json.JSONDecodeError as e:
        raise PreflightError(f"{path}:{e.lineno}: not JSON: {e.msg}") from e
    return shape_of(raw, path)


def shape_of(raw: dict[str, Any], path: str | Path) -> ModelShape:
    family = raw.get("model_type")
    if family not in FAMILIES:
        raise PreflightError(f"{path}: model_type {family!r} is not supported; supported: {', '.join(FAMILIES)}")
    _refuse_unsupported(raw, family, path)
    try:
        heads = raw["num_attention_heads"]
        return ModelShape(
            family=family,
            num_layers=raw["num_hidden_layers"],
            hidden_size=raw["hidden_size"],
            ffn_size=raw["intermediate_size"],
            num_heads=heads,
            num_kv_heads=raw.get("num_key_value_heads") or heads,
            head_dim=raw.get("head_dim") or raw["hidden_size"] // heads,
            vocab_size=raw["vocab_size"],
            max_positions=raw["max_position_embeddings"],
            norm_eps=raw["rms_norm_eps"],
            rope_theta=float((raw.get("rope_parameters") or {}).get("rope_theta") or raw.get("rope_theta") or 10000.0),
            tied=bool(raw.get("tie_word_embeddings", False)),
            qkv_bias=family == "qwen2" or bool(raw.get("attention_bias", False)),
            qk_norm=family == "qwen3",
            rope_scaling={"rope_type": rope_type(raw), **rope_settings(raw)},
        )
    except KeyError as e:
        raise PreflightError(f"{path}: the key {e} is missing") from e


def rope_settings(raw: dict[str, Any]) -> dict[str, Any]:
    """`rope_parameters` (transformers 5) or `rope_scaling` (before), {} if there is none."""
    return raw.get("rope_parameters") or raw.get("rope_scaling") or {}


def rope_type(raw: dict[str, Any]) -> str:
    return rope_settings(raw).get("rope_type") or rope_settings(raw).get("type") or "default"


def _refuse_unsupported(raw: dict[str, Any], family: str, path: str | Path) -> None:
    """What would be silently wrong is an error."""
    kind = rope_type(raw)
    window = raw.get("sliding_window") if family == "mistral" else None
    unsupported = {
        f"rope type {kind!r} (supported: {', '.join(ROPE_TYPES)})": kind not in ROPE_TYPES,
        "a partial_rotary_factor below 1": rope_settings(raw).get("partial_rotary_factor", 1.0) != 1.0,
        f"sliding_window={window}": bool(window) and window < raw.get("max_position_embeddings", 0),
        "attention_bias with an output bias": family != "qwen2" and bool(raw.get("attention_bias")),
        "mlp_bias": bool(raw.get("mlp_bias")),
        f"hidden_act {raw.get('hidden_act')!r} (supported: silu)": raw.get("hidden_act", "silu") != "silu",
        "use_sliding_window": bool(raw.get("use_sliding_window")),
    }
    for what, present in unsupported.items():
        if present:
            raise PreflightError(f"{path}: {what} is not supported yet")
