"""The engine's share of device memory and its decode graphs, from the configuration."""

from __future__ import annotations

import ast
import dataclasses
import importlib.util
from pathlib import Path

import pytest

from megaflow.config.schema import Config, ModelConfig, RewardConfig, RewardModelConfig, RolloutConfig
from megaflow.rollout import engine_args
from megaflow.rollout.engine_args import decode_graph_sizes, kv_bytes_per_token, kv_tokens, scoring_config
from megaflow.shape import Latent, shape_of

QWEN_1_5B = {
    "model_type": "qwen2", "num_hidden_layers": 28, "hidden_size": 1536, "intermediate_size": 8960, "num_attention_heads": 12,
    "num_key_value_heads": 2, "vocab_size": 151936, "max_position_embeddings": 32768, "rms_norm_eps": 1e-6, "tie_word_embeddings": True,
}  # fmt: skip


def config(**rollout) -> Config:
    return Config(model=ModelConfig(path="somewhere"), rollout=RolloutConfig(**rollout))


def test_keys_and_values_of_a_token_by_hand():
    """Qwen2.5-1.5B: 28 layers, 2 key/value heads of 128, keys and values, 2 bytes = 28,672 bytes."""
    shape = shape_of(QWEN_1_5B, "config.json")
    assert kv_bytes_per_token(config(), shape) == 28_672
    assert kv_bytes_per_token(config(tp=2), shape) == 14_336
    assert kv_bytes_per_token(config(tp=4), shape) == 14_336, "two heads on four workers: each holds one"


def test_a_token_of_latent_attention_by_hand():
    """DeepSeek-V3: 61 layers, a compressed vector of 512 and 64 with position, 2 bytes = 70,272 bytes, on every worker."""
    shape = dataclasses.replace(shape_of(QWEN_1_5B, "config.json"), num_layers=61, latent=Latent(1536, 512, 128, 64, 128))
    assert kv_bytes_per_token(config(), shape) == kv_bytes_per_token(config(tp=8), shape) == 70_272


def test_mem_fraction_is_a_part_of_the_device_whatever_else_is_on_it():
    """0.6 of 140e9 bytes, less 1,543,714,304 parameters of 2 bytes (the published size of Qwen2.5-1.5B), by 28,672 a token."""
    tokens = kv_tokens(config(mem_fraction=0.6), shape_of(QWEN_1_5B, "config.json"), int(140e9))
    assert tokens == (84_000_000_000 - 2 * 1_543_714_304) // 28_672


def test_an_engine_of_a_reward_model_goes_by_its_own_keys():
    """Half the share of the test above; no matrix for logits in a scorer's count: 151,936 * 1536 parameters less, were it not tied."""
    model = RewardModelConfig(where="engine", path="scorer", tp=2, mem_fraction=0.3)
    cfg = scoring_config(dataclasses.replace(config(mem_fraction=0.6, max_tokens=512, tp=4, ep=4), reward=RewardConfig(model=model)))
    assert (cfg.model.path, cfg.rollout.tp, cfg.rollout.ep, cfg.rollout.sleep_level) == ("scorer", 2, 1, "1")
    assert cfg.rollout.max_tokens == 0 and not cfg.rollout.cuda_graph
    shape = shape_of(QWEN_1_5B, "config.json")
    assert kv_tokens(cfg, shape, int(140e9)) == (42_000_000_000 - 1_543_714_304) // 14_336
    with pytest.raises(MemoryError, match=r"reward.model.mem_fraction=0.3 .* raise it, or reward.model.tp"):
        kv_tokens(cfg, shape, int(4e9), "reward.model")


def test_a_fraction_that_leaves_no_cache_is_refused_with_the_numbers():
    with pytest.raises(MemoryError, match=r"rollout.mem_fraction=0.02 .* 2.8 GB; the weights take 3.1 GB, which leaves 0 tokens"):
        kv_tokens(config(mem_fraction=0.02), shape_of(QWEN_1_5B, "config.json"), int(140e9))


@pytest.mark.parametrize("most", [1, 3, 8, 100, 256, 1000])
def test_every_batch_up_to_max_running_has_a_graph_that_is_not_much_larger(most):
    sizes = decode_graph_sizes(most)
    assert sizes == sorted(set(sizes)) and sizes[-2:] == [most, most + 1] and len(sizes) < 30, "the last for the spare request"
    for batch in range(1, most + 1):
        graph = min(s for s in sizes if s >= batch)
        assert graph <= max(2 * batch, batch + 8) or graph == most, (batch, graph)
        assert batch < 64 or graph <= 1.51 * batch


def test_the_arguments_are_known_to_the_installed_sglang():
    """Read from its source: importing it takes ten seconds, and ServerArgs itself would look for a GPU."""
    package = importlib.util.find_spec("sglang")
    tree = ast.parse((Path(package.origin).parent / "srt" / "server_args.py").read_text())
    body = next(n.body for n in tree.body if isinstance(n, ast.ClassDef) and n.name == "ServerArgs")
    known = {n.target.id for n in body if isinstance(n, ast.AnnAssign)}
    ours = ast.parse(Path(engine_args.__file__).read_text())
    calls = [n for n in ast.walk(ours) if isinstance(n, ast.Call) and getattr(n.func, "id", "") == "ServerArgs"]
    used = {k.arg for call in calls for k in call.keywords if k.arg}
    used |= {key.value for n in ast.walk(ours) if isinstance(n, ast.Dict) for key in n.keys if isinstance(key, ast.Constant)}
    assert len(calls) == 2 and {"cuda_graph_bs_decode", "load_format", "enable_memory_saver"} <= used
    assert used <= known, used - known
