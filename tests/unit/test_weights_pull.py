"""The plan of a pull: its pieces, applied to Megatron's shards byte by byte, give what SGLang stores, cut here by hand, in every layout."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import torch

from megaflow.parallel.pieces import ZEROS, Reading
from megaflow.shape import ModelShape, shape_of
from megaflow.types import Layout
from megaflow.weights.pull import Place, Source, can_pull, make_reading
from megaflow.weights.table import table

V, H, FFN, D, LAYERS = 67, 16, 24, 6, 4  # 67 rows are padded to 128; a head is 12 bytes in 16 bits, so no piece is aligned by luck
VOCAB = ("embed_tokens", "lm_head")
HF_NAMES = {"q_proj", "k_proj", "v_proj", "gate_proj", "up_proj"}


def make_shape(family: str, kv_heads: int, tied: bool = False) -> ModelShape:
    raw = dict(
        model_type=family, vocab_size=V, hidden_size=H, intermediate_size=FFN, num_hidden_layers=LAYERS, num_attention_heads=8,
        num_key_value_heads=kv_heads, head_dim=D, max_position_embeddings=64, rms_norm_eps=1e-6, tie_word_embeddings=tied,
        num_experts=4, num_experts_per_tok=2, moe_intermediate_size=8, norm_topk_prob=True,
    )  # fmt: skip
    return shape_of(raw, "config.json")


def latent_shape(q_rank: int | None) -> ModelShape:
    """DeepSeek-V3; without q_rank as Moonlight."""
    raw = dict(
        model_type="deepseek_v3", vocab_size=V, hidden_size=H, intermediate_size=FFN, num_hidden_layers=LAYERS, num_attention_heads=8,
        num_key_value_heads=8, max_position_embeddings=64, rms_norm_eps=1e-6, q_lora_rank=q_rank, kv_lora_rank=12, qk_nope_head_dim=5,
        qk_rope_head_dim=4, v_head_dim=3, n_routed_experts=4, num_experts_per_tok=2, moe_intermediate_size=8, n_shared_experts=2,
        first_k_dense_replace=1,
    )  # fmt: skip
    return shape_of(raw, "config.json")


def random_tensors(shape: ModelShape, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    g = torch.Generator().manual_seed(0)
    wanted = {name: (size, r.fp32) for r in table(shape) for name, size in zip(r.hf, r.sizes, strict=True)}
    return {name: torch.randn(size, generator=g).to(torch.float32 if fp32 else dtype) for name, (size, fp32) in wanted.items()}


def places(tp: int, pp: int, dp: int, hosts: int = 1) -> tuple[Place, ...]:
    """In Megatron's order: tp varies fastest, pp slowest."""
    world = tp * dp * pp
    return tuple(Place(r, f"host {r * hosts // world}", r % tp, r // (tp * dp), r // tp % dp) for r in range(world))


def shards(shape: ModelShape, hf: dict[str, torch.Tensor], source: Source) -> dict[tuple[int, str], bytes]:
    """(rank, parameter) -> its bytes, for what each rank holds: of the rest it has nothing to be read."""
    held = {}
    for p in source.places:
        for row in table(shape):
            if row.stage(source.pp, shape.num_layers) != p.pp or (row.expert >= 0 and row.expert * source.ep // 4 != p.ep):
                continue
            cut, index = (source.etp, p.etp) if row.expert >= 0 else (source.tp, p.tp)
            shard = row.kind.split([hf[n] for n in row.hf], cut, index, shape)
            held[p.rank, row.megatron] = shard.contiguous().view(torch.uint8).numpy().tobytes()
    return held


def apply(reading: Reading, held: dict[tuple[int, str], bytes]) -> list[torch.Tensor]:
    """The reader's tensors. Fails where a byte is written twice, or never."""
    itemsize = {"bfloat16": 2, "float32": 4}
    out = [np.zeros(math.prod(t.shape) * itemsize[t.dtype], np.uint8) for t in reading.targets]
    written = [np.zeros(len(o), np.int64) for o in out]
    for p in reading.pieces:
        for r in range(p.rows):
            to = p.target_offset + r * p.target_stride
            written[p.target][to : to + p.row_bytes] += 1
            if p.source == ZEROS:
                continue
            data, start = held[p.source, p.parameter], p.offset + r * p.stride
            assert start + p.row_bytes <= len(data), (p, len(data))
            out[p.target][to : to + p.row_bytes] = np.frombuffer(data[start : start + p.row_bytes], np.uint8)
    for target, count in zip(reading.targets, written, strict=True):
        assert (count == 1).all(), f"{target.name}: bytes written {sorted(set(count.tolist()))} times"
    return [torch.from_numpy(o).view(getattr(torch, t.dtype)).view(t.shape) for o, t in zip(out, reading.targets, strict=True)]


def engine_tensors_by_hand(shape: ModelShape, hf: dict[str, torch.Tensor], tp: int, rank: int) -> dict[str, torch.Tensor]:
    """SGLang's: rows of the vocabulary padded to a multiple of 64 and cut; whole heads of q, k and v one after another, a key-value head on
    several workers if there are more of them; gate over up; the input side of o_proj and down_proj cut; experts stacked. Of latent
    attention: the compressions whole, q's over k's and v's; heads cut."""

    def rows(t: torch.Tensor, parts: int = tp, part: int = rank) -> torch.Tensor:
        n = len(t) // parts
        return t[part * n : (part + 1) * n]

    out = {}
    for name, t in hf.items():
        before, module, kind = ("." + name).rsplit(".", 2)
        before = before.removeprefix(".")
        if module in VOCAB:
            out[name] = rows(torch.cat([t, torch.zeros(128 - V, H, dtype=t.dtype)]))
        elif ".experts." in name:
            continue
        elif module == "q_a_proj":
            out[f"{before}.fused_qkv_a_proj_with_mqa.{kind}"] = torch.cat([t, hf[name.replace(module, "kv_a_proj_with_mqa")]])
        elif module == "kv_a_proj_with_mqa":
            out |= {} if shape.latent.q_rank else {name: t}
        elif module in ("q_b_proj", "kv_b_proj") or (module == "q_proj" and shape.latent):
            out[name] = rows(t)
        elif module == "q_proj":
            kv_parts = min(tp, shape.num_kv_heads)
            kv = [rows(hf[name.replace("q_proj", x)], kv_parts, rank * kv_parts // tp) for x in ("k_proj", "v_proj")]
            out[f"{before}.qkv_proj.{kind}"] = torch.cat([rows(t), *kv])
        elif module == "gate_proj":
            out[f"{before}.gate_up_proj.{kind}"] = torch.cat([rows(t), rows(hf[name.replace("gate_proj", "up_proj")])])
        elif module in ("o_proj", "down_proj"):
            n = t.shape[1] // tp
            out[name] = t[:, rank * n : (rank + 1) * n]
        elif module not in HF_NAMES:
            out[name] = t
    return out | experts_by_hand(shape, hf, rows, tp, rank)


def experts_by_hand(shape, hf, rows, tp: int, rank: int) -> dict[str, torch.Tensor]:
    out = {}
    for i in filter(shape.is_sparse, range(LAYERS)):
        of = [{x: hf[f"model.layers.{i}.mlp.experts.{e}.{x}_proj.weight"] for x in ("gate", "up", "down")} for e in range(4)]
        n = 8 // tp
        out[f"model.layers.{i}.mlp.experts.w13_weight"] = torch.stack([torch.cat([rows(e["gate"]), rows(e["up"])]) for e in of])
        out[f"model.layers.{i}.mlp.experts.w2_weight"] = torch.stack([e["down"][:, rank * n : (rank + 1) * n] for e in of])
    return out


def check(
    shape: ModelShape, hf: dict[str, torch.Tensor], source: Source, engine_tp: int, dtype: torch.dtype, whole_experts: bool = False
) -> None:
    held = shards(shape, hf, source)
    last = len(source.places) - engine_tp  # of the last engine: its ranks are not the first replica's
    for reader in {*range(engine_tp), last}:
        rank = reader % engine_tp
        layout = Layout(engine_tp, rank, fused=True, ep=engine_tp if whole_experts else 1)
        reading = make_reading(shape, source, layout, reader, dtype)
        expected = engine_tensors_by_hand(shape, hf, engine_tp, rank)
        if whole_experts:
            whole, n = engine_tensors_by_hand(shape, hf, 1, 0), 4 // engine_tp
            expected |= {name: t[rank * n : (rank + 1) * n] for name, t in whole.items() if ".experts." in name}
        assert {t.name for t in reading.targets} == set(expected)
        for target, found in zip(reading.targets, apply(reading, held), strict=True):
            assert torch.equal(found, expected[target.name]), (target.name, reader)
        assert reading.nbytes == sum(t.nbytes for t in expected.values())
        assert Reading.from_json(reading.to_json()) == reading


@pytest.mark.parametrize(("actor_tp", "engine_tp"), list(itertools.product([1, 2, 4, 8], repeat=2)))
def test_pieces_make_what_sglang_stores(actor_tp, engine_tp):
    for (family, tied), pp in itertools.product([("qwen2", True), ("qwen3", False)], [1, 2, 4]):
        shape = make_shape(family, kv_heads=8 if actor_tp == 8 else 4, tied=tied)  # Megatron cuts between key-value heads only
        dp = max(1, engine_tp // (actor_tp * pp))
        source = Source(places(actor_tp, pp, dp), tp=actor_tp, pp=pp)
        check(shape, random_tensors(shape, torch.bfloat16), source, engine_tp, torch.bfloat16)


@pytest.mark.parametrize(("ep", "etp", "engine_tp"), [(1, 1, 1), (2, 1, 2), (4, 1, 2), (2, 2, 1), (1, 2, 4), (2, 2, 4)])
def test_experts_are_read_from_the_ranks_that_own_them(ep, etp, engine_tp):
    shape = make_shape("qwen3_moe", kv_heads=4)
    hf = random_tensors(shape, torch.float32)
    placed = tuple(Place(r, "host", tp=r % 2, pp=0, dp=r // 2, etp=r % etp, ep=r // etp % ep) for r in range(4))
    source = Source(placed, tp=2, ep=ep, etp=etp)
    check(shape, hf, source, engine_tp, torch.float32)
    check(shape, hf, source, engine_tp, torch.float32, whole_experts=True)


@pytest.mark.parametrize("q_rank", [None, 8])
@pytest.mark.parametrize(("tp", "ep", "engine_tp"), [(1, 1, 1), (2, 2, 2), (4, 2, 1), (1, 4, 4)])
def test_latent_attention_as_sglang_joins_it(q_rank, tp, ep, engine_tp):
    shape = latent_shape(q_rank)
    placed = tuple(Place(r, "host", tp=r % tp, pp=0, dp=r // tp, etp=0, ep=r % ep) for r in range(4))
    check(shape, random_tensors(shape, torch.bfloat16), Source(placed, tp=tp, ep=ep), engine_tp, torch.bfloat16)


@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2", "qwen3"])
def test_a_reader_of_plain_names_gets_transformers_tensors(family):
    shape = make_shape(family, kv_heads=4)
    hf = random_tensors(shape, torch.float32)
    source = Source(places(2, 2, 1), tp=2, pp=2)
    reading = make_reading(shape, source, Layout(), 1, torch.float32)
    assert {t.name: tuple(t.shape) for t in reading.targets} == {n: tuple(t.shape) for n, t in hf.items()}
    for target, found in zip(reading.targets, apply(reading, shards(shape, hf, source)), strict=True):
        assert torch.equal(found, hf[target.name]), target.name


def test_nothing_crosses_a_link_that_need_not():
    shape = make_shape("qwen3", kv_heads=4)
    same = [make_reading(shape, Source(places(2, 1, 2), tp=2), Layout(2, r % 2, True), r, torch.bfloat16) for r in range(4)]
    assert all(r.link_bytes == 0 and r.sources == [r.reader] for r in same), "the actor's shard is the engine's, on every replica"
    half = make_reading(shape, Source(places(2, 1, 1), tp=2), Layout(1, 0, True), 0, torch.bfloat16)
    cut = sum(t.nbytes for n, t in random_tensors(shape, torch.bfloat16).items() if "norm" not in n and n.split(".")[-2] not in VOCAB)
    assert half.link_bytes == cut // 2 + 2 * 64 * H * 2, "its half, rows of the vocabularies too, and no norm: both have them"
    copies = [make_reading(shape, Source(places(1, 1, 4)), Layout(1, 0, True), r, torch.bfloat16) for r in range(4)]
    assert all(r.sources == [r.reader] for r in copies)


def test_every_rank_is_asked_by_its_own_replica():
    shape = make_shape("qwen3", kv_heads=4)
    source = Source(places(2, 2, 2), tp=2, pp=2)
    readings = [make_reading(shape, source, Layout(1, 0, True), r, torch.bfloat16) for r in range(8)]
    replica = {p.rank: p.dp for p in source.places}
    assert all({replica[s] for s in r.sources} == {replica[r.reader]} and len(r.sources) == 4 for r in readings)


def test_a_pull_needs_all_sources_on_the_readers_host():
    shape = make_shape("qwen3", kv_heads=4)
    assert can_pull(shape, Source(places(2, 1, 4, hosts=2), tp=2)), "each host has whole replicas"
    assert not can_pull(shape, Source(places(2, 2, 2, hosts=2), tp=2, pp=2)), "the stages lie on different hosts"
    assert can_pull(shape, Source(places(2, 2, 2), tp=2, pp=2))
