"""A Hugging Face folder of a published size with random weights, and the tiny tokenizer: for measurements that need no trained model.

    python tools/bench/make_model.py qwen2.5-1.5b models/bench-1.5b
"""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
sys.path.insert(0, str(ROOT))

# layers, hidden, ffn, heads, kv heads, vocabulary, tied; from the models' own config.json
SHAPES = {
    "smollm2-135m": (30, 576, 1536, 9, 3, 49152, True),
    "qwen2.5-0.5b": (24, 896, 4864, 14, 2, 151936, True),
    "qwen2.5-1.5b": (28, 1536, 8960, 12, 2, 151936, True),
    "qwen2.5-3b": (36, 2048, 11008, 16, 2, 151936, True),
    "qwen2.5-7b": (28, 3584, 18944, 28, 4, 152064, False),
}
# layers, hidden, an expert's ffn, experts, of which a token, heads, kv heads, vocabulary; Qwen3-30B-A3B with fewer layers and experts
MIXTURES = {
    "qwen3-moe-3b": (8, 2048, 768, 64, 8, 32, 4, 151936),
    "qwen3-moe-tiny": (2, 64, 32, 8, 2, 4, 2, 512),
}


def make(name: str, out: str | Path) -> None:
    """bf16 weights, N(0, 0.02)."""
    import torch
    from transformers import AutoModelForCausalLM

    from tools.make_tiny_model import make_tokenizer

    tokenizer = make_tokenizer(307)
    common = {
        "max_position_embeddings": 32768, "rms_norm_eps": 1e-6, "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
        "bos_token_id": None, "eos_token_id": tokenizer.eos_token_id,
    }  # fmt: skip
    config = dense(SHAPES[name], common) if name in SHAPES else mixture(MIXTURES[name], common)
    torch.manual_seed(0)
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(out)
    tokenizer.save_pretrained(out)


def dense(sizes: tuple, common: dict):
    from transformers import Qwen2Config

    layers, hidden, ffn, heads, kv_heads, vocab, tied = sizes
    return Qwen2Config(
        vocab_size=vocab, hidden_size=hidden, intermediate_size=ffn, num_hidden_layers=layers, num_attention_heads=heads,
        num_key_value_heads=kv_heads, tie_word_embeddings=tied, **common,
    )  # fmt: skip


def mixture(sizes: tuple, common: dict):
    from transformers import Qwen3MoeConfig

    layers, hidden, ffn, experts, top_k, heads, kv_heads, vocab = sizes
    return Qwen3MoeConfig(
        vocab_size=vocab, hidden_size=hidden, intermediate_size=3 * hidden, moe_intermediate_size=ffn, num_hidden_layers=layers,
        num_experts=experts, num_experts_per_tok=top_k, norm_topk_prob=True, num_attention_heads=heads, num_key_value_heads=kv_heads,
        head_dim=128, tie_word_embeddings=False, **common,
    )  # fmt: skip


if __name__ == "__main__":
    if len(sys.argv) != 3 or sys.argv[1] not in (*SHAPES, *MIXTURES):
        sys.exit(f"usage: {sys.argv[0]} {{{','.join((*SHAPES, *MIXTURES))}}} FOLDER")
    make(sys.argv[1], sys.argv[2])
