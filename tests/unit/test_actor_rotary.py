"""Rotary frequencies against transformers' own."""

from __future__ import annotations

import pytest
import torch

SCALINGS = [
    {"rope_type": "default"},
    {"rope_type": "linear", "factor": 4.0},
    {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192},
    {"rope_type": "llama3", "factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192},
]


@pytest.mark.parametrize("scaling", SCALINGS, ids=lambda s: f"{s['rope_type']}{s.get('factor', '')}")
@pytest.mark.parametrize("head_dim", [64, 128])
def test_frequencies(scaling, head_dim):
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    from megaflow.actor.modules import inverse_frequencies

    rope = {"rope_theta": 500000.0, **scaling}
    config = LlamaConfig(hidden_size=4 * head_dim, num_attention_heads=4, max_position_embeddings=131072, rope_parameters=rope)
    expected = LlamaRotaryEmbedding(config).inv_freq
    torch.testing.assert_close(inverse_frequencies(head_dim, 500000.0, scaling), expected, rtol=1e-6, atol=0)
