"""The one name table: Megatron-core's parameter names against Hugging Face's and SGLang's. Used for loading, sync and export alike."""

from __future__ import annotations

from dataclasses import dataclass

from megaflow.shape import ModelShape
from megaflow.weights.kinds import GATED, QKV_ROWS, REPLICATED, ROW, VOCAB, Kind


@dataclass(frozen=True)
class Row:
    """One parameter. `layer` is its decoder layer, -1 before the first, `num_layers` after the last.

    fused    SGLang's name where it stores the `hf` tensors as one
    """

    megatron: str
    hf: tuple[str, ...]
    kind: Kind
    layer: int
    fused: str

    def stage(self, pp: int, num_layers: int) -> int:
        """Pipeline stage that owns it: layers are spread evenly."""
        return min(max(self.layer, 0) * pp // num_layers, pp - 1)


def table(shape: ModelShape) -> list[Row]:
    """All parameters of the model, in the order of the forward pass. Tied output layers are no parameter of their own."""
    rows = [Row("embedding.word_embeddings.weight", ("model.embed_tokens.weight",), VOCAB, -1, "model.embed_tokens.weight")]
    for i in range(shape.num_layers):
        rows += _layer(shape, i)
    rows.append(_plain("decoder.final_layernorm.weight", "model.norm.weight", REPLICATED, shape.num_layers))
    if not shape.tied:
        rows.append(_plain("output_layer.weight", "lm_head.weight", VOCAB, shape.num_layers))
    return rows


def _plain(megatron: str, hf: str, kind: Kind, layer: int) -> Row:
    return Row(megatron, (hf,), kind, layer, hf)


def _layer(shape: ModelShape, i: int) -> list[Row]:
    here, there = f"decoder.layers.{i}.", f"model.layers.{i}."
    attention, mlp = there + "self_attn.", there + "mlp."

    def qkv(suffix: str) -> Row:
        names = tuple(f"{attention}{x}_proj.{suffix}" for x in "qkv")
        return Row(f"{here}self_attention.linear_qkv.{suffix}", names, QKV_ROWS, i, f"{attention}qkv_proj.{suffix}")

    rows = [_plain(here + "input_layernorm.weight", there + "input_layernorm.weight", REPLICATED, i), qkv("weight")]
    if shape.qkv_bias:
        rows.append(qkv("bias"))
    if shape.qk_norm:
        rows.append(_plain(here + "self_attention.q_layernorm.weight", attention + "q_norm.weight", REPLICATED, i))
        rows.append(_plain(here + "self_attention.k_layernorm.weight", attention + "k_norm.weight", REPLICATED, i))
    rows.append(_plain(here + "self_attention.linear_proj.weight", attention + "o_proj.weight", ROW, i))
    rows.append(_plain(here + "pre_mlp_layernorm.weight", there + "post_attention_layernorm.weight", REPLICATED, i))
    gate_up = (mlp + "gate_proj.weight", mlp + "up_proj.weight")
    rows.append(Row(here + "mlp.linear_fc1.weight", gate_up, GATED, i, mlp + "gate_up_proj.weight"))
    rows.append(_plain(here + "mlp.linear_fc2.weight", mlp + "down_proj.weight", ROW, i))
    return rows
