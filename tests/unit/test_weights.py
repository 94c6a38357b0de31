"""The name table and the kinds of parameter, against transformers' own names and against slices cut by hand."""

from __future__ import annotations

import itertools

import pytest
import torch

from megaflow.config.schema import ParallelConfig
from megaflow.shape import ModelShape, shape_of
from megaflow.types import Layout
from megaflow.weights.plan import engine_shapes, hf_shapes, make_plan, shard_shape
from megaflow.weights.reshard import engine_parts
from megaflow.weights.table import table

SIZES = dict(
    vocab_size=307, hidden_size=64, intermediate_size=96, num_hidden_layers=4, num_attention_heads=8, num_key_value_heads=4,
    max_position_embeddings=128, rms_norm_eps=1e-6,
)  # fmt: skip
FAMILIES = [(f, tied) for f in ("llama", "mistral", "qwen2", "qwen3") for tied in (False, True)]


def make_shape(family: str, tied: bool) -> ModelShape:
    extra = {"head_dim": 24} if family == "qwen3" else {}
    return shape_of({"model_type": family, "tie_word_embeddings": tied, **SIZES, **extra}, "config.json")


def transformers_tensors(family: str, tied: bool) -> dict[str, torch.Tensor]:
    from transformers import AutoConfig, AutoModelForCausalLM

    extra = {"head_dim": 24} if family == "qwen3" else {}
    config = AutoConfig.for_model(family, tie_word_embeddings=tied, **SIZES, **extra)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config)
    return {n: torch.randn_like(p) for n, p in model.named_parameters()}


@pytest.mark.parametrize(("family", "tied"), FAMILIES)
def test_names_and_sizes_are_those_of_transformers(family, tied):
    shape = make_shape(family, tied)
    ours = {name: size for row in table(shape) for name, size in zip(row.hf, hf_shapes(row, shape), strict=True)}
    theirs = {name: tuple(t.shape) for name, t in transformers_tensors(family, tied).items()}
    assert ours == theirs
    assert shape.num_parameters == sum(t.numel() for t in transformers_tensors(family, tied).values())


@pytest.mark.parametrize("tp", [1, 2, 4])
@pytest.mark.parametrize(("family", "tied"), FAMILIES)
def test_hf_to_megatron_to_hf_is_bitwise(family, tied, tp):
    shape, hf = make_shape(family, tied), transformers_tensors(family, tied)
    for row in table(shape):
        shards = [row.kind.split([hf[n] for n in row.hf], tp, r, shape) for r in range(tp)]
        assert all(tuple(s.shape) == shard_shape(row, shape, tp) for s in shards)
        back = row.kind.join(shards, shape)
        for name, t in zip(row.hf, back, strict=True):
            assert torch.equal(t[: hf[name].shape[0]], hf[name]), name
            assert not t[hf[name].shape[0] :].any(), "padding must be zero"


def engine_tensor_by_hand(row, hf: dict[str, torch.Tensor], tp: int, rank: int) -> torch.Tensor:
    """What SGLang stores: whole heads of q, then of k, then of v; gate, then up; rows of the embedding padded to a multiple of 64."""
    full = [hf[n] for n in row.hf]
    module = row.hf[0].split(".")[-2]
    if module in ("embed_tokens", "lm_head"):
        padded = torch.zeros(320, full[0].shape[1])  # 307 -> 320
        padded[:307] = full[0]
        return padded[rank * 320 // tp : (rank + 1) * 320 // tp]
    if module in ("o_proj", "down_proj"):
        size = full[0].shape[1] // tp
        return full[0][:, rank * size : (rank + 1) * size]
    if module == "q_proj" and tp == 8:  # four key-value heads for eight workers: two workers share one
        heads = [full[0].chunk(8)[rank], full[1].chunk(4)[rank // 2], full[2].chunk(4)[rank // 2]]
        return torch.cat(heads)
    if module in ("q_proj", "gate_proj"):
        return torch.cat([t[rank * len(t) // tp : (rank + 1) * len(t) // tp] for t in full])
    return full[0]


@pytest.mark.parametrize(("actor_tp", "engine_tp"), list(itertools.product([1, 2, 4], [1, 2, 4, 8])))
def test_megatron_shards_become_the_engines(actor_tp, engine_tp):
    for family in ("qwen2", "qwen3"):
        shape, hf = make_shape(family, False), transformers_tensors(family, False)
        for rank in range(engine_tp):
            layout = Layout(engine_tp, rank, fused=True)
            plan = make_plan(shape, ParallelConfig(tp=actor_tp), layout, torch.float32, 1 << 20)
            assert plan.mode == ("direct" if actor_tp == engine_tp else "gather")
            for item in (i for b in plan.buckets for i in b.items):
                shards = [item.row.kind.split([hf[n] for n in item.row.hf], actor_tp, r, shape) for r in range(actor_tp)]
                if plan.mode == "direct":
                    parts = item.row.kind.join([shards[rank]], shape)
                else:
                    parts = engine_parts(item.row.kind, shards, shape, layout)
                found = torch.cat([p.reshape(-1) for p in parts])
                assert torch.equal(found, engine_tensor_by_hand(item.row, hf, engine_tp, rank).reshape(-1)), item.row.megatron
                assert [(e.name, e.shape) for e in item.entries] == engine_shapes(item.row, shape, layout)


def test_a_plan_covers_every_parameter_once_and_keeps_stages_apart():
    shape = make_shape("qwen2", True)
    for pp, bucket_bytes in itertools.product([1, 2, 4], [1, 1 << 14, 1 << 30]):
        plan = make_plan(shape, ParallelConfig(tp=2, pp=pp), Layout(2, 1, fused=True), torch.bfloat16, bucket_bytes)
        names = [item.row.megatron for b in plan.buckets for item in b.items]
        assert sorted(names) == sorted(r.megatron for r in table(shape))
        for bucket in plan.buckets:
            assert {item.row.stage(pp, shape.num_layers) for item in bucket.items} == {bucket.stage}
            assert bucket.nbytes <= bucket_bytes or len(bucket.items) == 1
            ends = [(e.offset, e.offset + e.nbytes) for e in bucket.entries]
            assert all(a[1] <= b[0] for a, b in itertools.pairwise(ends)) and ends[-1][1] <= bucket.nbytes


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model_type": "mamba"}, "model_type 'mamba' is not supported; supported: deepseek_v3, llama, mistral, mixtral, qwen2, qwen2_moe"),
        ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4}}, "rope type 'yarn'"),
        ({"model_type": "mistral", "sliding_window": 64}, "sliding_window=64"),
        ({"rope_parameters": {"partial_rotary_factor": 0.5}}, "partial_rotary_factor"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu'"),
        ({"mlp_bias": True}, "mlp_bias"),
        ({"use_sliding_window": True}, "use_sliding_window"),
        ({"vocab_size": None}, "vocab_size"),
    ],
)
def test_what_would_be_silently_wrong_is_an_error(change, message):
    from megaflow.types import PreflightError

    raw = {"model_type": "llama", **SIZES, **change}
    raw = {k: v for k, v in raw.items() if v is not None}
    with pytest.raises(PreflightError, match=message.split(" (")[0]):
        shape_of(raw, "config.json")
