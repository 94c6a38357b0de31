"""Families with experts: names and sizes against the files that transformers writes, sizes of the published models against transformers."""

from __future__ import annotations

import math

import pytest
import torch
from safetensors import safe_open

from megaflow.shape import families, shape_of
from megaflow.types import PreflightError
from megaflow.weights.kinds import Vocab
from megaflow.weights.table import table
from tests import tiny

# config.json of the published models, without what does not shape a tensor
QWEN3_30B_A3B = dict(
    model_type="qwen3_moe", vocab_size=151936, hidden_size=2048, intermediate_size=6144, num_hidden_layers=48, num_attention_heads=32,
    num_key_value_heads=4, head_dim=128, max_position_embeddings=40960, rms_norm_eps=1e-6, rope_theta=1e6, tie_word_embeddings=False,
    num_experts=128, num_experts_per_tok=8, moe_intermediate_size=768, norm_topk_prob=True, decoder_sparse_step=1, mlp_only_layers=[],
    attention_bias=False, sliding_window=None, use_sliding_window=False, rope_scaling=None, hidden_act="silu",
)  # fmt: skip
QWEN2_57B_A14B = dict(
    model_type="qwen2_moe", vocab_size=151936, hidden_size=3584, intermediate_size=18944, num_hidden_layers=28, num_attention_heads=28,
    num_key_value_heads=4, max_position_embeddings=131072, rms_norm_eps=1e-6, rope_theta=1e6, tie_word_embeddings=False, num_experts=64,
    num_experts_per_tok=8, moe_intermediate_size=2560, shared_expert_intermediate_size=20480, norm_topk_prob=False, decoder_sparse_step=1,
    sliding_window=131072, use_sliding_window=False, hidden_act="silu",
)  # fmt: skip
MIXTRAL_8X7B = dict(
    model_type="mixtral", vocab_size=32000, hidden_size=4096, intermediate_size=14336, num_hidden_layers=32, num_attention_heads=32,
    num_key_value_heads=8, max_position_embeddings=32768, rms_norm_eps=1e-5, rope_theta=1e6, tie_word_embeddings=False,
    num_local_experts=8, num_experts_per_tok=2, sliding_window=None, hidden_act="silu",
)  # fmt: skip
MOONLIGHT_16B_A3B = dict(
    model_type="deepseek_v3", vocab_size=163840, hidden_size=2048, intermediate_size=11264, moe_intermediate_size=1408,
    num_hidden_layers=27, num_attention_heads=16, num_key_value_heads=16, n_shared_experts=2, n_routed_experts=64,
    routed_scaling_factor=2.446, kv_lora_rank=512, q_lora_rank=None, qk_rope_head_dim=64, v_head_dim=128, qk_nope_head_dim=128,
    topk_method="noaux_tc", n_group=1, topk_group=1, num_experts_per_tok=6, moe_layer_freq=1, first_k_dense_replace=1,
    norm_topk_prob=True, scoring_func="sigmoid", hidden_act="silu", max_position_embeddings=8192, rms_norm_eps=1e-5, rope_theta=50000.0,
    rope_scaling=None, attention_bias=False, tie_word_embeddings=False,
)  # fmt: skip
DEEPSEEK_V3 = dict(
    model_type="deepseek_v3", vocab_size=129280, hidden_size=7168, intermediate_size=18432, moe_intermediate_size=2048,
    num_hidden_layers=61, num_attention_heads=128, num_key_value_heads=128, n_shared_experts=1, n_routed_experts=256,
    routed_scaling_factor=2.5, kv_lora_rank=512, q_lora_rank=1536, qk_rope_head_dim=64, v_head_dim=128, qk_nope_head_dim=128,
    topk_method="noaux_tc", n_group=8, topk_group=4, num_experts_per_tok=8, moe_layer_freq=1, first_k_dense_replace=3,
    norm_topk_prob=True, scoring_func="sigmoid", hidden_act="silu", max_position_embeddings=163840, rms_norm_eps=1e-6, rope_theta=10000.0,
    attention_bias=False, tie_word_embeddings=False, num_nextn_predict_layers=1,
    rope_scaling=dict(
        type="yarn", beta_fast=32, beta_slow=1, factor=40, mscale=1.0, mscale_all_dim=1.0, original_max_position_embeddings=4096,
    ),
)  # fmt: skip
# -> parameters in billions as published, to the digits given
PUBLISHED = {
    "Qwen3-30B-A3B": (QWEN3_30B_A3B, 30.5),
    "Qwen2-57B-A14B": (QWEN2_57B_A14B, 57.4),
    "Mixtral-8x7B": (MIXTRAL_8X7B, 46.7),
    "Moonlight-16B-A3B": (MOONLIGHT_16B_A3B, 16.0),
    "DeepSeek-V3": (DEEPSEEK_V3, 671.0),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    base = tmp_path_factory.mktemp("models")
    return lambda family, tied: tiny.model_folder(base / f"{family}-{tied}", family, tied)


@pytest.mark.parametrize(("family", "tied"), tiny.MIXTURES)
def test_names_and_sizes_are_those_of_the_files_that_transformers_writes(folder, family, tied):
    from megaflow.shape import read_shape

    path = folder(family, tied)
    with safe_open(f"{path}/model.safetensors", "pt") as f:
        theirs = {name: tuple(f.get_slice(name).get_shape()) for name in f.keys()}  # noqa: SIM118 (not a dict)
    shape = read_shape(path)
    rows = table(shape)
    assert {name: size for row in rows for name, size in zip(row.hf, row.sizes, strict=True)} == theirs
    buffers = sum(math.prod(size) for name, size in theirs.items() if name.endswith("e_score_correction_bias"))
    assert shape.num_parameters == sum(map(math.prod, theirs.values())) - buffers
    assert len({row.megatron for row in rows}) == len(rows)


@pytest.mark.parametrize("parts", [1, 2])
@pytest.mark.parametrize(("family", "tied"), tiny.MIXTURES)
def test_every_parameter_survives_being_cut_bitwise(folder, family, tied, parts):
    from megaflow.shape import read_shape

    shape, g = read_shape(folder(family, tied)), torch.Generator().manual_seed(0)
    for row in table(shape):
        hf = [torch.randn(size, generator=g) for size in row.sizes]
        back = row.kind.join([row.kind.split(hf, parts, r, shape) for r in range(parts)], shape)
        rows = shape.vocab_size if isinstance(row.kind, Vocab) else None
        assert all(torch.equal(found[:rows], t) for found, t in zip(back, hf, strict=True)), row.megatron


@pytest.mark.parametrize("model", PUBLISHED)
def test_published_sizes(model):
    """Against transformers' model of the same config.json, without memory for its weights."""
    from transformers import AutoConfig, AutoModelForCausalLM

    raw, billions = PUBLISHED[model]
    shape = shape_of(raw, "config.json")
    with torch.device("meta"):
        theirs = AutoModelForCausalLM.from_config(AutoConfig.for_model(**{**raw, "rope_scaling": None}))
    sizes = {name: tuple(p.shape) for name, p in theirs.named_parameters()}
    assert shape.num_parameters == sum(map(math.prod, sizes.values()))
    assert round(shape.num_parameters / 1e9, 1) == billions
    ours = {name: size for row in table(shape) if row.expert < 0 and not row.fp32 for name, size in zip(row.hf, row.sizes, strict=True)}
    names = families().get(shape.family).names
    plain = {name.replace(".mlp.gate.weight", f".{names.router}"): size for name, size in sizes.items() if ".experts." not in name}
    assert ours == plain


def test_where_the_experts_are():
    moonlight, deepseek = shape_of(MOONLIGHT_16B_A3B, "x"), shape_of(DEEPSEEK_V3, "x")
    assert [deepseek.is_sparse(i) for i in range(5)] == [False, False, False, True, True]
    assert (moonlight.latent.q_rank, deepseek.latent.q_rank, deepseek.head_dim) == (None, 1536, 192)
    assert (moonlight.experts.groups, deepseek.experts.groups, deepseek.experts.top_groups) == (1, 8, 4)
    dense_where = shape_of({**QWEN3_30B_A3B, "num_hidden_layers": 6, "decoder_sparse_step": 2, "mlp_only_layers": [3]}, "x")
    assert dense_where.experts.layers == (False, True, False, False, False, True)
    biases = [row for row in table(deepseek) if row.fp32]
    assert len(biases) == 58 and biases[0].hf == ("model.layers.3.mlp.gate.e_score_correction_bias",)


@pytest.mark.parametrize(
    ("raw", "change", "message"),
    [
        (DEEPSEEK_V3, {"quantization_config": {"quant_method": "fp8"}}, "quantization_config"),
        (DEEPSEEK_V3, {"scoring_func": "softmax"}, "scoring_func 'softmax'"),
        (DEEPSEEK_V3, {"norm_topk_prob": False}, "norm_topk_prob=false"),
        (DEEPSEEK_V3, {"topk_group": 2}, "topk_group=2 with num_experts_per_tok=8"),
        (DEEPSEEK_V3, {"rope_scaling": {**DEEPSEEK_V3["rope_scaling"], "mscale": 0.7}}, "yarn with mscale=0.7, mscale_all_dim=1.0"),
        (DEEPSEEK_V3, {"rope_interleave": False}, "rope_interleave=false"),
        (QWEN3_30B_A3B, {"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "rope type 'yarn'"),
        (MIXTRAL_8X7B, {"sliding_window": 4096}, "sliding_window=4096"),
        (QWEN3_30B_A3B, {"num_experts": None, "num_local_experts": None}, "num_local_experts"),
    ],
)
def test_what_would_be_silently_wrong_is_an_error(raw, change, message):
    changed = {k: v for k, v in {**raw, **change}.items() if v is not None or k not in change}
    with pytest.raises(PreflightError, match=message):
        shape_of(changed, "config.json")


def test_an_unknown_family_names_itself_and_the_list():
    with pytest.raises(PreflightError, match="model_type 'mamba' is not supported; supported: deepseek_v3, llama, mistral, mixtral, qwen2"):
        shape_of({"model_type": "mamba"}, "config.json")
