"""Invariant 5 on CUDA: after sleep the device's memory is back where it was, turn after turn, and an engine that wakes says the same."""

from __future__ import annotations

import pytest
import torch

from tests import tiny
from tests.ranks import run_ranks

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")


@pytest.mark.timeout(600)
@pytest.mark.parametrize("level", ["1", "2"])
def test_sleep_gives_memory_back_and_nothing_stays(level, tmp_path):
    model = tiny.model_folder(tmp_path / "qwen2", "qwen2", True, layers=2)
    found = run_ranks("engine_memory", 1, model, level, timeout=500, env={"TEST_DTYPE": "bfloat16"})[0]
    assert found["kv_tokens"] >= 1 << 18, "rollout.max_tokens, whatever else is on the device"
    assert all(tokens == found["tokens"][0] for tokens in found["tokens"]), "level 1 keeps the weights, level 2 gets them from the sync"
    kv_gb = (1 << 18) * 2 * 2 * 2 * 32 * 2 / 1e9  # keys and values, 2 layers, 2 heads of 32, 2 bytes
    assert found["awake"][2] - found["asleep"][2] > 0.9 * kv_gb
    assert max(found["asleep"][2:]) - found["asleep"][2] < 0.064, found["asleep"]
    assert {"weights", "kv_cache", "decode_graphs", "first_token"} <= set(found["seconds"])
