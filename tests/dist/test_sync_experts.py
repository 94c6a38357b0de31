"""Experts reach an engine that divides them otherwise: two trainer ranks with half of them each, an engine of two ranks with EP=2.

Tolerance of log-probabilities in fp32: 3e-5.
"""

from __future__ import annotations

import pytest

from tests import tiny
from tests.ranks import run_ranks

LAYERS, EXPERTS = 2, 4


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    model = tiny.model_folder(tmp_path_factory.mktemp("model") / "qwen3_moe", "qwen3_moe", False, layers=LAYERS)
    return run_ranks("sync_experts", 2, model, "1", "2", "2", "2", timeout=560)


@pytest.mark.timeout(580)
def test_the_engine_equals_transformers_and_the_trainer(found):
    for rank in found:
        for number, r in enumerate(rank["rounds"]):
            assert r["stats"]["sync/version"] == number and r["stats"]["sync/proof"] == 1.0
            assert ("sync/copy_ms" in r["stats"]) == (number == 0), "a pull, then buckets"
            assert r["transformers"][0] < 3e-5 and r["trainer"][0] < 3e-5
            assert r["update"]["train/grad_norm"] > 0


def test_the_engine_returns_the_routes_of_transformers_and_replaying_them_changes_nothing(found):
    """In fp32 all three choose alike, but for scores that are equal to their last bits. Routes of cached prompts come too."""
    for number in range(2):
        agreeing, total = (sum(rank["rounds"][number]["routes"][name] for rank in found) for name in ("agreeing", "all"))
        assert total > 1000 and agreeing >= 0.999 * total
        for rank in found:
            routes = rank["rounds"][number]["routes"]
            assert routes["moe/routes_differ"] == found[0]["rounds"][number]["routes"]["moe/routes_differ"] < 1e-3
            assert routes["same bits without replay"] or routes["moe/routes_differ"] > 0


def test_replay_takes_the_routers_noise_out_of_the_mismatch(found):
    for rank in found:
        assert rank["noisy"]["differ"] > 0.005 and rank["noisy"]["replayed"] < 0.5 * rank["noisy"]["free"], rank["noisy"]


def test_each_worker_gets_its_own_experts_and_no_others(found):
    """Experts 0 and 1 lie on rank 0 of both, 2 and 3 on rank 1: none crosses."""
    for rank, report in enumerate(found):
        own = {f"decoder.layers.{i}.mlp.experts.local_experts.{e}.linear_fc{n}.weight"
               for i in range(LAYERS) for e in (2 * rank, 2 * rank + 1) for n in (1, 2)}  # fmt: skip
        assert {name for name in report["read"] if ".experts." in name} == own
        assert report["targets"]["model.layers.1.mlp.experts.w13_weight"] == [EXPERTS // 2, 128, 128]
        assert report["targets"]["model.layers.1.mlp.experts.w2_weight"] == [EXPERTS // 2, 128, 64]


def test_a_flipped_value_of_an_expert_is_caught_and_named(found):
    for rank in found:
        pulled, in_buckets = rank["flipped"]
        assert "ProofError" in pulled and any(r["flipped_tensor"] in pulled for r in found)
        assert "ProofError" in in_buckets and ".mlp.experts." in in_buckets
        assert rank["mended"] == ""
