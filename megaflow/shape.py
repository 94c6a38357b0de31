"""What a Hugging Face folder's config.json says of a model: its family and its sizes. Reads JSON only, so that it answers at once."""

from __future__ import annotations

import importlib
import json
import math
from collections.abc import Iterator
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from megaflow.types import PreflightError

ROPE_TYPES = ("default", "linear", "llama3")
VOCAB_MULTIPLE = 64  # SGLang pads the vocabulary to a multiple of 64; the same rows on both sides make its transfer a plain copy


@dataclass(frozen=True)
class Experts:
    """A mixture of experts: which layers have one, its sizes, and how its router turns scores into weights.

    score        softmax over all experts, or sigmoid of each
    normalize    the weights of the chosen experts are divided by their sum, then multiplied by `scale`
    groups       only experts of the best `top_groups` of so many groups are candidates (1: all are)
    bias         a buffer that is added to the scores for choosing, and not to the weights (DeepSeek-V3)
    """

    count: int
    top_k: int
    ffn_size: int
    layers: tuple[bool, ...]  # [L]
    shared_ffn_size: int = 0  # of the expert that every token visits; 0: there is none
    shared_gate: bool = False  # its output is multiplied by a sigmoid of its own
    score: str = "softmax"
    normalize: bool = True
    scale: float = 1.0
    groups: int = 1
    top_groups: int = 1
    bias: bool = False


@dataclass(frozen=True)
class Latent:
    """Multi-head latent attention (DeepSeek-V2, section 2.1): ranks of the compressed q (None: not compressed) and kv; dims of a head."""

    q_rank: int | None
    kv_rank: int
    nope_dim: int  # of q and k, without position
    rope_dim: int  # of q and k, with rotary position; all heads share this part of k
    value_dim: int


@dataclass(frozen=True)
class ModelShape:
    """Sizes of a decoder; head_dim is given, not derived, since Qwen3 chooses it freely. With `latent` it is that of q and k."""

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
    experts: Experts | None = None
    latent: Latent | None = None

    def is_sparse(self, layer: int) -> bool:
        """Whether that decoder layer routes to experts."""
        return self.experts is not None and self.experts.layers[layer]

    def padded_vocab(self, tp: int) -> int:
        """Rows of the embedding over all tp ranks, V rounded up."""
        multiple = math.lcm(VOCAB_MULTIPLE, tp)
        return math.ceil(self.vocab_size / multiple) * multiple

    @property
    def num_parameters(self) -> int:
        """Without padding; buffers (the experts' bias) are not counted."""
        h = self.hidden_size
        layers = sum(2 * h + self._attention_parameters + self._mlp_parameters(i) for i in range(self.num_layers))
        return layers + h + self.vocab_size * h * (1 if self.tied else 2)

    @property
    def _attention_parameters(self) -> int:
        h, d, m = self.hidden_size, self.head_dim, self.latent
        if m is not None:
            q = self.num_heads * d
            query = h * q if m.q_rank is None else m.q_rank * (h + 1 + q)
            key_value = h * (m.kv_rank + m.rope_dim) + m.kv_rank * (1 + self.num_heads * (m.nope_dim + m.value_dim))
            return query + key_value + self.num_heads * m.value_dim * h
        qkv = (self.num_heads + 2 * self.num_kv_heads) * d
        return qkv * h + self.num_heads * d * h + (qkv if self.qkv_bias else 0) + (2 * d if self.qk_norm else 0)

    def _mlp_parameters(self, layer: int) -> int:
        h, e = self.hidden_size, self.experts
        if e is None or not self.is_sparse(layer):
            return 3 * h * self.ffn_size
        return e.count * (h + 3 * h * e.ffn_size) + 3 * h * e.shared_ffn_size + (h if e.shared_gate else 0)


def read_shape(folder: str | Path) -> ModelShape:
    """Raises PreflightError when the folder or its config.json is missing, broken, or of a family that is not supported."""
    path = Path(folder) / "config.json"
    if not path.is_file():
        raise PreflightError(f"model.path={folder}: no config.json there; give a Hugging Face folder (config.json, safetensors, tokenizer)")
    try:
        raw = json.loads(path.read_text())
    except json.JSONDecodeError as e:
        raise PreflightError(f"{path}:{e.lineno}: not JSON: {e.msg}") from e
    except UnicodeDecodeError as e:
        raise PreflightError(f"{path}: not JSON: not UTF-8 at byte {e.start}") from e
    if not isinstance(raw, dict):
        raise PreflightError(f"{path}: holds a {type(raw).__name__} and not a model's settings, which are a JSON object")
    return shape_of(raw, path)


def families() -> Any:
    """The Registry of model families. By name, since this file lies below the package that has them."""
    return importlib.import_module("megaflow.weights.families").FAMILIES


FLAGS = {"tie_word_embeddings", "attention_bias", "mlp_bias", "qkv_bias", "norm_topk_prob", "use_sliding_window", "rope_interleave"}
SIZES = {"num_hidden_layers", "hidden_size", "intermediate_size", "num_attention_heads", "vocab_size", "max_position_embeddings"}


def shape_of(raw: dict[str, Any], path: str | Path) -> ModelShape:
    """The shape that a config.json says. Raises PreflightError for a family or a setting that is not supported, naming it."""
    for key in SIZES & raw.keys():
        if type(raw[key]) is not int or raw[key] < 1:
            raise PreflightError(f"{path}: {key} is {raw[key]!r}, which must be a whole number, at least 1")
    for key in FLAGS & raw.keys():
        if not isinstance(raw[key], bool | None):
            raise PreflightError(f"{path}: {key} is {raw[key]!r}, which must be true or false")
    for key in ("rope_parameters", "rope_scaling"):
        if not isinstance(raw.get(key) or {}, dict):
            raise PreflightError(f"{path}: {key} is {raw[key]!r}, which must be an object or null")
    name = raw.get("model_type")
    if name not in families().names():
        raise PreflightError(f"{path}: model_type {name!r} is not supported; supported: {', '.join(families().names())}")
    family = families().get(name)
    try:
        for what, present in {**unsupported(raw), **family.refuse(raw)}.items():
            if present:
                raise PreflightError(f"{path}: {what} is not supported yet")
        heads = raw["num_attention_heads"]
        common = {
            "family": name,
            "num_layers": raw["num_hidden_layers"],
            "hidden_size": raw["hidden_size"],
            "ffn_size": raw["intermediate_size"],
            "num_heads": heads,
            "num_kv_heads": raw.get("num_key_value_heads") or heads,
            "head_dim": raw.get("head_dim") or raw["hidden_size"] // heads,
            "vocab_size": raw["vocab_size"],
            "max_positions": raw["max_position_embeddings"],
            "norm_eps": raw["rms_norm_eps"],
            "rope_theta": float((raw.get("rope_parameters") or {}).get("rope_theta") or raw.get("rope_theta") or 10000.0),
            "tied": bool(raw.get("tie_word_embeddings", False)),
            "qkv_bias": False,
            "qk_norm": False,
            "rope_scaling": {"rope_type": rope_type(raw), **rope_settings(raw)},
        }
        shape = ModelShape(**{**common, **family.read(raw)})
    except KeyError as e:
        raise PreflightError(f"{path}: the key {e} is missing") from e
    except (TypeError, ValueError, AttributeError, ArithmeticError) as e:
        raise PreflightError(f"{path}: a setting has a value of the wrong kind: {e}") from e
    if wrong := [text for part in (shape, shape.experts, shape.latent) if part is not None for text in _odd_numbers(part)]:
        raise PreflightError(f"{path}: {'; '.join(wrong)}")
    return shape


def _odd_numbers(part: ModelShape | Experts | Latent) -> Iterator[str]:
    """Fields that should be numbers and, as the file has it, are none."""
    for f in fields(part):
        value, kind = getattr(part, f.name), str(f.type)
        if kind.startswith("int") and (type(value) is not int or value < 0) and not (value is None and "None" in kind):
            yield f"{f.name} is {value!r}, which must be a whole number"
        if kind == "float" and (type(value) not in (int, float) or not math.isfinite(value)):
            yield f"{f.name} is {value!r}, which must be a number"


def rope_settings(raw: dict[str, Any]) -> dict[str, Any]:
    """`rope_parameters` (transformers 5) or `rope_scaling` (before), {} if there is none."""
    return raw.get("rope_parameters") or raw.get("rope_scaling") or {}


def rope_type(raw: dict[str, Any]) -> str:
    return rope_settings(raw).get("rope_type") or rope_settings(raw).get("type") or "default"


def unsupported(raw: dict[str, Any]) -> dict[str, bool]:
    """What would be silently wrong in any family, and whether this config.json asks for it."""
    return {
        "a partial_rotary_factor below 1": rope_settings(raw).get("partial_rotary_factor", 1.0) != 1.0,
        "mlp_bias": bool(raw.get("mlp_bias")),
        f"hidden_act {raw.get('hidden_act')!r} (supported: silu)": raw.get("hidden_act", "silu") != "silu",
        "use_sliding_window": bool(raw.get("use_sliding_window")),
        "a quantized checkpoint (quantization_config; convert its weights to bfloat16 first)": bool(raw.get("quantization_config")),
    }


def plain_attention(raw: dict[str, Any], rope_types: tuple[str, ...] = ROPE_TYPES) -> dict[str, bool]:
    """The same for what most families share: rotary kinds, a window over all the context, no bias of the output projection."""
    kind, window = rope_type(raw), raw.get("sliding_window")
    ignored = "use_sliding_window" in raw  # Qwen's configs name a window and say apart that it is off
    return {
        f"rope type {kind!r} (supported: {', '.join(rope_types)})": kind not in rope_types,
        f"sliding_window={window}": bool(window) and not ignored and window < raw.get("max_position_embeddings", 0),
        "attention_bias with an output bias": bool(raw.get("attention_bias")),
    }
