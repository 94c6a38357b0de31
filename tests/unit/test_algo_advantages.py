"""Advantages and filters against sums written out in float64."""

from __future__ import annotations

import math
import random

import torch

from megaflow.algo import ADVANTAGES
from megaflow.algo.advantages import grpo
from megaflow.algo.filters import uniform_groups
from megaflow.config.schema import AlgoConfig

DR_GRPO = AlgoConfig(norm_std=False)


def by_hand(rewards: list[float], groups: list[int], norm_std: bool) -> list[float]:
    out = []
    for reward, group in zip(rewards, groups, strict=True):
        peers = [r for r, g in zip(rewards, groups, strict=True) if g == group]
        mean = math.fsum(peers) / len(peers)
        if len(peers) == 1:
            out.append(0.0)
            continue
        std = math.sqrt(math.fsum((r - mean) ** 2 for r in peers) / (len(peers) - 1))
        out.append((reward - mean) / (std + 1e-6) if norm_std else reward - mean)
    return out


def test_two_right_of_four():
    # mean 1/2, unbiased variance 4 * 1/4 / 3 = 1/3
    advantages = grpo(torch.tensor([1.0, 0.0, 0.0, 1.0]), torch.tensor([7, 7, 7, 7]), AlgoConfig())
    expected = 0.5 / (math.sqrt(1 / 3) + 1e-6)
    torch.testing.assert_close(advantages, torch.tensor([expected, -expected, -expected, expected]), rtol=1e-6, atol=0)
    assert grpo(torch.tensor([1.0, 0.0, 0.0, 1.0]), torch.tensor([7, 7, 7, 7]), DR_GRPO).tolist() == [0.5, -0.5, -0.5, 0.5]


def test_ragged_shuffled_groups_with_gaps_in_their_labels():
    rng = random.Random(3)
    groups = [label for label, size in {5: 1, -2: 2, 90: 17, 3: 8, 4: 1, 11: 300}.items() for _ in range(size)]
    rng.shuffle(groups)
    rewards = [rng.gauss(1, 3) for _ in groups]
    for cfg in (AlgoConfig(), DR_GRPO):
        got = grpo(torch.tensor(rewards, dtype=torch.float64), torch.tensor(groups), cfg)
        expected = torch.tensor(by_hand(rewards, groups, cfg.norm_std), dtype=torch.float64)
        torch.testing.assert_close(got, expected, rtol=1e-12, atol=1e-12)


def test_equal_rewards_give_exactly_zero():
    # In fp32, mean([0.1] * 7) is not 0.1; divided by a std of ~1e-8 + 1e-6 that would be an advantage of about 1e-2.
    for value in (0.1, 1 / 3, -7.3e6, 1e-30):
        assert grpo(torch.full((7,), value), torch.zeros(7, dtype=torch.int64), AlgoConfig()).abs().max() == 0


def test_group_of_one_is_zero_and_finite():
    advantages = grpo(torch.tensor([5.0, 1.0, 2.0]), torch.tensor([0, 1, 1]), AlgoConfig())
    assert advantages[0] == 0 and advantages.isfinite().all()


def test_no_samples():
    assert grpo(torch.zeros(0), torch.zeros(0, dtype=torch.int64), AlgoConfig()).shape == (0,)


def test_advantages_of_a_group_do_not_depend_on_the_others():
    rewards, groups = torch.tensor([1.0, 0.0, 0.5, 9.0, -4.0]), torch.tensor([0, 0, 0, 1, 1])
    assert torch.equal(grpo(rewards, groups, AlgoConfig())[:3], grpo(rewards[:3], groups[:3], AlgoConfig()))


def test_registered_and_reads_no_tokens():
    assert ADVANTAGES.get("grpo") is grpo
    assert grpo.needs_tokens is False


def test_uniform_groups():
    rewards = torch.tensor([1.0, 0.0, 1.0, 1.0, 0.25, 0.0, 0.0])
    groups = torch.tensor([4, 2, 4, 2, 9, 0, 0])
    assert uniform_groups(rewards, groups).tolist() == [True, False, True, False, True, True, True]


def test_uniform_groups_agree_with_zero_advantages():
    torch.manual_seed(0)
    rewards, groups = torch.randint(0, 2, (200,)).float(), torch.randint(0, 60, (200,))
    mask = uniform_groups(rewards, groups)
    assert 0 < mask.sum() < 200
    assert torch.equal(mask, grpo(rewards, groups, AlgoConfig()) == 0)
