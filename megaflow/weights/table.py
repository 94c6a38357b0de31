"""The one name table: Megatron-core's parameter names against Hugging Face's and SGLang's. Used for loading, sync and export alike."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from megaflow.shape import ModelShape, families
from megaflow.weights.families import Names
from megaflow.weights.kinds import COLUMN, COMPRESSED, GATED, QKV_ROWS, REPLICATED, ROW, VOCAB, Kind

Size = tuple[int, ...]


@dataclass(frozen=True)
class Row:
    """One parameter. `layer` is its decoder layer, -1 before the first, `num_layers` after the last.

    sizes    of the whole `hf` tensors
    fused    SGLang's name where it stores the `hf` tensors as one
    expert   number of the expert that it belongs to, among all of the layer's; -1: of none. Experts are cut by etp, not by tp
    fp32     kept in fp32 in a 16-bit model: a buffer that decides between nearly equal scores
    joint    (first row, rows in all) of SGLang's tensor, where it stores several parameters as one
    """

    megatron: str
    hf: tuple[str, ...]
    kind: Kind
    layer: int
    fused: str
    sizes: tuple[Size, ...]
    expert: int = -1
    fp32: bool = False
    joint: tuple[int, int] | None = None

    def stage(self, pp: int, num_layers: int, vpp: int = 1) -> int:
        """Pipeline stage that owns it: layers are spread evenly; with vpp chunks a stage holds every pp-th of pp * vpp parts."""
        parts = pp * vpp
        part = min(max(self.layer, 0) * parts // num_layers, parts - 1)
        return part % pp


def table(shape: ModelShape) -> list[Row]:
    """All parameters of the model, in the order of the forward pass. Tied output layers are no parameter of their own."""
    vocab, h = (shape.vocab_size, shape.hidden_size), shape.hidden_size
    rows = [Row("embedding.word_embeddings.weight", ("model.embed_tokens.weight",), VOCAB, -1, "model.embed_tokens.weight", (vocab,))]
    names = families().get(shape.family).names
    for i in range(shape.num_layers):
        rows += _Layer(shape, names, i).rows()
    rows.append(_plain("decoder.final_layernorm.weight", "model.norm.weight", REPLICATED, shape.num_layers, (h,)))
    if not shape.tied:
        rows.append(_plain("output_layer.weight", "lm_head.weight", VOCAB, shape.num_layers, vocab))
    return rows


def _plain(megatron: str, hf: str, kind: Kind, layer: int, size: Size) -> Row:
    return Row(megatron, (hf,), kind, layer, hf, (size,))


class _Layer:
    """The rows of decoder layer `i`."""

    def __init__(self, shape: ModelShape, names: Names, i: int):
        self.shape, self.names, self.i = shape, names, i
        self.here, self.there = f"decoder.layers.{i}.", f"model.layers.{i}."

    def rows(self) -> Iterator[Row]:
        h = self.shape.hidden_size
        yield self._one("input_layernorm.weight", "input_layernorm.weight", REPLICATED, (h,))
        yield from self._attention() if self.shape.latent is None else self._latent_attention()
        yield self._one("pre_mlp_layernorm.weight", "post_attention_layernorm.weight", REPLICATED, (h,))
        if self.shape.is_sparse(self.i):
            yield from self._experts()
        else:
            yield from self._mlp("mlp.", "mlp.", self.shape.ffn_size)

    def _one(self, megatron: str, hf: str, kind: Kind, size: Size) -> Row:
        return _plain(self.here + megatron, self.there + hf, kind, self.i, size)

    def _attention(self) -> Iterator[Row]:
        s, ours, theirs = self.shape, "self_attention.", "self_attn."
        h, heads = s.hidden_size, [n * s.head_dim for n in (s.num_heads, s.num_kv_heads, s.num_kv_heads)]

        def qkv(suffix: str, sizes: tuple[Size, ...]) -> Row:
            names = tuple(f"{self.there}{theirs}{x}_proj.{suffix}" for x in "qkv")
            fused = f"{self.there}{theirs}qkv_proj.{suffix}"
            return Row(f"{self.here}{ours}linear_qkv.{suffix}", names, QKV_ROWS, self.i, fused, sizes)

        yield qkv("weight", tuple((n, h) for n in heads))
        if s.qkv_bias:
            yield qkv("bias", tuple((n,) for n in heads))
        if s.qk_norm:
            for x in "qk":
                yield self._one(f"{ours}{x}_layernorm.weight", f"{theirs}{x}_norm.weight", REPLICATED, (s.head_dim,))
        yield self._one(ours + "linear_proj.weight", theirs + "o_proj.weight", ROW, (h, heads[0]))

    def _latent_attention(self) -> Iterator[Row]:
        s, m, ours, theirs = self.shape, self.shape.latent, "self_attention.", "self_attn."
        h, q, kv = s.hidden_size, s.num_heads * s.head_dim, s.num_heads * (m.nope_dim + m.value_dim)
        if m.q_rank is None:
            yield self._one(ours + "linear_q_proj.weight", theirs + "q_proj.weight", COLUMN, (q, h))
        else:
            yield self._compression(ours + "linear_q_down_proj.weight", theirs + "q_a_proj.weight", m.q_rank, 0)
            yield self._one(ours + "q_layernorm.weight", theirs + "q_a_layernorm.weight", REPLICATED, (m.q_rank,))
            yield self._one(ours + "linear_q_up_proj.weight", theirs + "q_b_proj.weight", COLUMN, (q, m.q_rank))
        down = (ours + "linear_kv_down_proj.weight", theirs + "kv_a_proj_with_mqa.weight")
        yield self._compression(*down, m.kv_rank + m.rope_dim, m.q_rank or 0)
        yield self._one(ours + "kv_layernorm.weight", theirs + "kv_a_layernorm.weight", REPLICATED, (m.kv_rank,))
        yield self._one(ours + "linear_kv_up_proj.weight", theirs + "kv_b_proj.weight", COLUMN, (kv, m.kv_rank))
        yield self._one(ours + "linear_proj.weight", theirs + "o_proj.weight", ROW, (h, s.num_heads * m.value_dim))

    def _compression(self, megatron: str, hf: str, rows: int, first: int) -> Row:
        """SGLang stores q's above k's and v's, where q has one."""
        m, size = self.shape.latent, (rows, self.shape.hidden_size)
        if m.q_rank is None:
            return self._one(megatron, hf, COMPRESSED, size)
        fused = self.there + "self_attn.fused_qkv_a_proj_with_mqa.weight"
        joint = (first, m.q_rank + m.kv_rank + m.rope_dim)
        return Row(self.here + megatron, (self.there + hf,), COMPRESSED, self.i, fused, (size,), joint=joint)

    def _mlp(self, megatron: str, hf: str, ffn: int) -> Iterator[Row]:
        h, theirs = self.shape.hidden_size, self.there + hf
        gate_up = (theirs + "gate_proj.weight", theirs + "up_proj.weight")
        yield Row(f"{self.here}{megatron}linear_fc1.weight", gate_up, GATED, self.i, theirs + "gate_up_proj.weight", ((ffn, h),) * 2)
        yield self._one(megatron + "linear_fc2.weight", hf + "down_proj.weight", ROW, (h, ffn))

    def _experts(self) -> Iterator[Row]:
        e, n, h = self.shape.experts, self.names, self.shape.hidden_size
        yield self._one("mlp.router.weight", n.router, REPLICATED, (e.count, h))
        if e.bias:
            bias = self.there + n.router_bias
            yield Row(self.here + "mlp.router.expert_bias", (bias,), REPLICATED, self.i, bias, ((e.count,),), fp32=True)
        if e.shared_ffn_size:
            yield from self._mlp("mlp.shared_experts.", n.shared, e.shared_ffn_size)
        if e.shared_gate:
            yield self._one("mlp.shared_experts.gate_weight", n.shared_gate, REPLICATED, (1, h))
        for number in range(e.count):
            yield from self._expert(number)

    def _expert(self, number: int) -> Iterator[Row]:
        h, ffn = self.shape.hidden_size, self.shape.experts.ffn_size
        here = f"{self.here}mlp.experts.local_experts.{number}."
        all_of_them = self.there + self.names.expert.partition("{e}")[0]  # SGLang stores a layer's experts in two tensors
        gate, up, down = (self.there + self.names.expert.format(e=number) + part + ".weight" for part in self.names.expert_parts)
        yield Row(here + "linear_fc1.weight", (gate, up), GATED, self.i, all_of_them + "w13_weight", ((ffn, h),) * 2, number)
        yield Row(here + "linear_fc2.weight", (down,), ROW, self.i, all_of_them + "w2_weight", ((h, ffn),), number)
