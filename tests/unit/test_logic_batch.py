"""The logic block on scored samples: what lengths cost, who is left out, and that a greedy baseline arrives. Values by hand."""

from __future__ import annotations

import pytest
import torch

from megaflow.config.schema import ActorConfig, AlgoConfig, Config, KLConfig, LengthConfig, OverlongConfig, SamplingConfig
from megaflow.trainer.logic import apply_decisions, make_batch
from megaflow.trainer.sampling import baselines
from megaflow.types import Prompt, Sample

ROWS = [(1.0, 2, "stop"), (1.0, 8, "stop"), (0.0, 10, "length"), (0.0, 4, "stop"), (0.0, 10, "length"), (0.0, 3, "stop")]


def samples(baseline: float = 0.0) -> list[Sample]:
    """Two groups of three, of (reward, length, finish) as in ROWS; the second group's rewards are all 0."""
    out = []
    for i, (reward, length, finish) in enumerate(ROWS):
        sample = Sample(Prompt("s:1", [1], "?"), i // 3, i % 3, torch.zeros(length).long(), torch.zeros(length), finish, 0)
        sample.reward, sample.reward_parts, sample.baseline = reward, {"f": reward}, baseline
        out.append(sample)
    return out


def config(**algo) -> Config:
    return Config(algo=AlgoConfig(**algo), sampling=SamplingConfig(max_new_tokens=10), actor=ActorConfig(mini_batch=2))


def test_overlong_punishment_and_length_penalty_reach_the_advantages():
    cfg = config(advantage="rloo", overlong=OverlongConfig(buffer=0.5, penalty=2.0), length=LengthConfig("linear", 0.1))
    made = samples()
    batch = make_batch(made, cfg)
    shaped = [1 - 0.02, 1 - 1.2 - 0.08, 0 - 2 - 0.1, 0 - 0.04, 0 - 2 - 0.1, 0 - 0.03]  # 8 tokens: (5 - 8) / 5 * 2
    for g in (0, 1):
        mine = shaped[3 * g : 3 * g + 3]
        for i in range(3):
            others = [r for j, r in enumerate(mine) if j != i]
            assert batch.decisions[g, i].advantage == pytest.approx(mine[i] - sum(others) / 2, abs=1e-12)
            assert batch.decisions[g, i].reward == ROWS[3 * g + i][0]  # as it was given
    assert batch.stats["reward/overlong"] == pytest.approx((-1.2 - 2 - 2) / 6)
    assert batch.stats["reward/length"] == pytest.approx(-0.1 * 37 / 60)
    assert batch.stats["reward/mean"] == pytest.approx(2 / 6)


def test_truncated_responses_and_uniform_groups_are_left_out():
    made = samples()
    batch = make_batch(made, config(overlong=OverlongConfig(filter=True)))
    assert set(batch.decisions) == {(0, 0), (0, 1), (1, 0), (1, 2)} and batch.stats["batch/left_out"] == pytest.approx(2 / 6)
    assert [s.mini_batch for s in apply_decisions(made, batch)] == [0, 0, 1, 1]
    mean, std = 2 / 3, (3 * (2 / 3) * (1 / 3) / 2) ** 0.5  # the truncated one counts within its group
    assert batch.decisions[0, 0].advantage == pytest.approx((1 - mean) / (std + 1e-6))
    both = make_batch(samples(), config(overlong=OverlongConfig(filter=True), drop_uniform=True))
    assert set(both.decisions) == {(0, 0), (0, 1)} and both.stats["batch/left_out"] == pytest.approx(4 / 6)


def test_the_greedy_baseline_and_the_distance_to_the_reference():
    made = samples(baseline=0.25)
    for s in made:
        s.sums["ref_kl"] = 2.0
    batch = make_batch(made, config(advantage="remax", kl=KLConfig(where="reward", coef=0.1)))
    assert [d.advantage for d in batch.decisions.values()] == pytest.approx([r - 0.2 - 0.25 for r, _, _ in ROWS])
    greedy = [Sample(Prompt("s:1", [1], "?"), 7, 3, torch.zeros(9).long(), None, "stop", 0, reward=1.0)]
    cfg = config(overlong=OverlongConfig(buffer=0.5, penalty=2.0), length=LengthConfig("linear", 0.1))
    assert baselines(greedy, cfg) == {7: pytest.approx(1 - 2 * 4 / 5 - 0.09)} and baselines([], cfg) == {}
