"""Dense families at the sizes of published models: parameters to the last one, names and sizes against transformers' model on no device."""

from __future__ import annotations

import math

import pytest
import torch

from megaflow.shape import shape_of
from megaflow.types import PreflightError
from megaflow.weights.table import table

# config.json of the published models, without what does not shape a tensor or turn a position
LLAMA_2_7B = dict(
    model_type="llama", vocab_size=32000, hidden_size=4096, intermediate_size=11008, num_hidden_layers=32, num_attention_heads=32,
    num_key_value_heads=32, max_position_embeddings=4096, rms_norm_eps=1e-5, rope_scaling=None, attention_bias=False, hidden_act="silu",
    tie_word_embeddings=False,
)  # fmt: skip
LLAMA_3_1_8B = dict(
    model_type="llama", vocab_size=128256, hidden_size=4096, intermediate_size=14336, num_hidden_layers=32, num_attention_heads=32,
    num_key_value_heads=8, max_position_embeddings=131072, rms_norm_eps=1e-5, rope_theta=500000.0, attention_bias=False, mlp_bias=False,
    hidden_act="silu", tie_word_embeddings=False,
    rope_scaling=dict(
        factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=8192, rope_type="llama3",
    ),
)  # fmt: skip
MISTRAL_7B_V0_3 = dict(
    model_type="mistral", vocab_size=32768, hidden_size=4096, intermediate_size=14336, num_hidden_layers=32, num_attention_heads=32,
    num_key_value_heads=8, max_position_embeddings=32768, rms_norm_eps=1e-5, rope_theta=1e6, sliding_window=None, hidden_act="silu",
    tie_word_embeddings=False,
)  # fmt: skip
QWEN2_5_05B = dict(
    model_type="qwen2", vocab_size=151936, hidden_size=896, intermediate_size=4864, num_hidden_layers=24, num_attention_heads=14,
    num_key_value_heads=2, max_position_embeddings=32768, max_window_layers=24, rms_norm_eps=1e-6, rope_theta=1e6, sliding_window=32768,
    use_sliding_window=False, hidden_act="silu", tie_word_embeddings=True,
)  # fmt: skip
QWEN2_5_7B = dict(
    model_type="qwen2", vocab_size=152064, hidden_size=3584, intermediate_size=18944, num_hidden_layers=28, num_attention_heads=28,
    num_key_value_heads=4, max_position_embeddings=131072, max_window_layers=28, rms_norm_eps=1e-6, rope_theta=1e6, sliding_window=131072,
    use_sliding_window=False, hidden_act="silu", tie_word_embeddings=False,
)  # fmt: skip
QWEN3_8B = dict(
    model_type="qwen3", vocab_size=151936, hidden_size=4096, intermediate_size=12288, num_hidden_layers=36, num_attention_heads=32,
    num_key_value_heads=8, head_dim=128, max_position_embeddings=40960, max_window_layers=36, rms_norm_eps=1e-6, rope_theta=1e6,
    rope_scaling=None, attention_bias=False, sliding_window=None, use_sliding_window=False, hidden_act="silu", tie_word_embeddings=False,
)  # fmt: skip
SMOLLM2_135M = dict(
    model_type="llama", vocab_size=49152, hidden_size=576, intermediate_size=1536, num_hidden_layers=30, num_attention_heads=9,
    num_key_value_heads=3, max_position_embeddings=8192, rms_norm_eps=1e-5, rope_theta=100000, rope_scaling=None, attention_bias=False,
    mlp_bias=False, hidden_act="silu", tie_word_embeddings=True,
)  # fmt: skip
SMOLLM2_1_7B = dict(
    model_type="llama", vocab_size=49152, hidden_size=2048, intermediate_size=8192, num_hidden_layers=24, num_attention_heads=32,
    num_key_value_heads=32, max_position_embeddings=8192, rms_norm_eps=1e-5, rope_theta=130000, rope_scaling=None, attention_bias=False,
    mlp_bias=False, hidden_act="silu", tie_word_embeddings=True,
)  # fmt: skip
# -> parameters as the models' own pages count those of their safetensors files
PUBLISHED = {
    "Llama-2-7B": (LLAMA_2_7B, 6_738_415_616),
    "Llama-3.1-8B": (LLAMA_3_1_8B, 8_030_261_248),
    "Mistral-7B-v0.3": (MISTRAL_7B_V0_3, 7_248_023_552),
    "Qwen2.5-0.5B": (QWEN2_5_05B, 494_032_768),
    "Qwen2.5-7B": (QWEN2_5_7B, 7_615_616_512),
    "Qwen3-8B": (QWEN3_8B, 8_190_735_360),
    "SmolLM2-135M": (SMOLLM2_135M, 134_515_008),
    "SmolLM2-1.7B": (SMOLLM2_1_7B, 1_711_376_384),
}


@pytest.mark.parametrize("model", PUBLISHED)
def test_the_table_has_every_parameter_of_transformers_model(model: str) -> None:
    from transformers import AutoConfig, AutoModelForCausalLM

    raw, parameters = PUBLISHED[model]
    shape = shape_of(raw, "config.json")
    with torch.device("meta"):
        theirs = AutoModelForCausalLM.from_config(AutoConfig.for_model(**raw))
    sizes = {name: tuple(p.shape) for name, p in theirs.named_parameters()}  # a tied output layer is named once
    ours = {name: size for row in table(shape) for name, size in zip(row.hf, row.sizes, strict=True)}
    assert ours == sizes
    assert shape.num_parameters == sum(map(math.prod, sizes.values())) == parameters


def test_positions_are_turned_as_the_published_configs_say() -> None:
    llama, llama2 = shape_of(LLAMA_3_1_8B, "x"), shape_of(LLAMA_2_7B, "x")
    assert llama.rope_theta == 500000.0 and llama.rope_scaling == LLAMA_3_1_8B["rope_scaling"]
    assert llama2.rope_theta == 10000.0 and llama2.rope_scaling["rope_type"] == "default"  # its config.json names no base
    assert shape_of(QWEN2_5_7B, "x").qkv_bias and shape_of(QWEN3_8B, "x").qk_norm  # the window that Qwen2.5 names is off
    with pytest.raises(PreflightError, match="sliding_window=4096"):  # Mistral-7B-v0.1
        shape_of({**MISTRAL_7B_V0_3, "vocab_size": 32000, "sliding_window": 4096, "rope_theta": 10000.0}, "x")
