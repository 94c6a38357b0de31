"""Advantages with other baselines than GRPO's, against loops over plain floats written from the papers."""

from __future__ import annotations

import itertools
import math
import random

import pytest
import torch

from megaflow.algo import ADVANTAGES
from megaflow.algo.advantages import gpg, grpo, opo, reinforce_pp, reinforce_pp_baseline, rloo
from megaflow.algo.pass_at_k import pass_at_k
from megaflow.config.schema import AlgoConfig
from megaflow.types import ConfigError

NAMES = ["grpo", "rloo", "opo", "gpg", "reinforce_pp", "reinforce_pp_baseline", "pass_at_k"]


def batch(seed: int = 3) -> tuple[list[float], list[int], list[int]]:
    """Ragged, shuffled groups, one of one sample and one of equal rewards; lengths of which one is 0."""
    rng = random.Random(seed)
    groups = [label for label, size in {5: 1, -2: 2, 90: 17, 3: 8, 11: 40, 7: 4}.items() for _ in range(size)]
    rng.shuffle(groups)
    rewards = [0.1 if g == 7 else rng.gauss(1, 3) for g in groups]
    lengths = [rng.randint(1, 500) for _ in groups]
    lengths[-1] = 0
    return rewards, groups, lengths


def tensors(rewards: list[float], groups: list[int], lengths: list[int]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return torch.tensor(rewards, dtype=torch.float64), torch.tensor(groups), torch.tensor(lengths)


def peers(groups: list[int], i: int) -> list[int]:
    return [j for j, group in enumerate(groups) if group == groups[i]]


def same(got: torch.Tensor, expected: list[float]) -> None:
    torch.testing.assert_close(got, torch.tensor(expected, dtype=torch.float64), rtol=1e-10, atol=1e-10)


def test_rloo_is_the_reward_less_the_mean_of_the_others():
    rewards, groups, lengths = batch()
    expected = []
    for i, reward in enumerate(rewards):
        others = [rewards[j] for j in peers(groups, i) if j != i]
        expected.append(reward - math.fsum(others) / len(others) if others else 0.0)
    same(rloo(*tensors(rewards, groups, lengths)[:2], AlgoConfig()), expected)


def test_opo_weighs_the_baseline_by_length():
    rewards, groups, lengths = batch()
    expected = []
    for i, reward in enumerate(rewards):
        total = sum(lengths[j] for j in peers(groups, i))
        expected.append(reward - math.fsum(lengths[j] * rewards[j] for j in peers(groups, i)) / total)
    r, g, n = tensors(rewards, groups, lengths)
    same(opo(r, g, AlgoConfig(), lengths=n), expected)
    assert not torch.allclose(opo(r, g, AlgoConfig(), lengths=n), opo(r, g, AlgoConfig(), lengths=torch.ones_like(n)))
    with pytest.raises(AssertionError, match="lengths"):
        opo(r, g, AlgoConfig())


def test_the_baseline_of_opo_has_the_least_variance():
    """If a sequence's squared gradient is its length l, the variance of l's gradient is sum of l * (r - b)^2, least at b = OPO's."""
    rewards, lengths = [1.0, 0.0, 0.0, 1.0, 0.3], [10, 400, 20, 30, 77]
    r, g, n = tensors(rewards, [0] * 5, lengths)
    baseline = rewards[0] - opo(r, g, AlgoConfig(), lengths=n)[0].item()

    def variance(b: float) -> float:
        return math.fsum(length * (reward - b) ** 2 for reward, length in zip(rewards, lengths, strict=True))

    assert all(variance(baseline) < variance(baseline + shift) for shift in (-0.01, 0.01))


def test_gpg_scales_up_by_the_part_that_carries_a_signal():
    rewards, groups, lengths = [1.0, 0.0, 1.0, 1.0, 0.0, 0.0, 5.0], [0, 0, 1, 1, 2, 2, 3], [1] * 7  # only group 0 does: 2 of 7
    r, g, _ = tensors(rewards, groups, lengths)
    same(gpg(r, g, AlgoConfig()), [3.5 * 0.5, -3.5 * 0.5, 0, 0, 0, 0, 0])
    same(gpg(r, g, AlgoConfig(drop_uniform=True)), [0.5, -0.5, 0, 0, 0, 0, 0])
    assert gpg(torch.ones(4), torch.zeros(4, dtype=torch.int64), AlgoConfig()).tolist() == [0.0] * 4


def normalised_over_tokens(values: list[float], lengths: list[int]) -> list[float]:
    """Each token has its sequence's value; mean and std over all of them, one after the other."""
    tokens = [value for value, length in zip(values, lengths, strict=True) for _ in range(length)]
    mean = math.fsum(tokens) / len(tokens)
    std = math.sqrt(math.fsum((t - mean) ** 2 for t in tokens) / len(tokens))
    return [(value - mean) / (std + 1e-6) for value in values]


def test_reinforce_pp_normalises_over_all_tokens_of_the_batch():
    rewards, groups, lengths = batch()
    r, g, n = tensors(rewards, groups, lengths)
    same(reinforce_pp(r, g, AlgoConfig(), lengths=n), normalised_over_tokens(rewards, lengths))
    same(reinforce_pp(r, g, AlgoConfig()), normalised_over_tokens(rewards, [1] * len(rewards)))
    assert torch.equal(reinforce_pp(r, g, AlgoConfig(), lengths=n), reinforce_pp(r, torch.arange(len(r)), AlgoConfig(), lengths=n))


def test_reinforce_pp_baseline_takes_the_group_mean_first():
    rewards, groups, lengths = batch()
    centred = [r - math.fsum(rewards[j] for j in peers(groups, i)) / len(peers(groups, i)) for i, r in enumerate(rewards)]
    r, g, n = tensors(rewards, groups, lengths)
    same(reinforce_pp_baseline(r, g, AlgoConfig(), lengths=n), normalised_over_tokens(centred, lengths))
    without = reinforce_pp_baseline(r, g, AlgoConfig())
    same(without, normalised_over_tokens(centred, [1] * len(rewards)))
    assert without[g == 7].abs().max() < 1e-9  # a group of equal rewards, when sequences count alike


def pass_at_k_by_enumeration(rewards: list[float], k: int, norm_std: bool) -> list[float]:
    best = {subset: max(rewards[i] for i in subset) for subset in itertools.combinations(range(len(rewards)), k)}
    mean = math.fsum(best.values()) / len(best)
    std = math.sqrt(math.fsum((value - mean) ** 2 for value in best.values()) / len(best))
    out = []
    for i in range(len(rewards)):
        mine = [value for subset, value in best.items() if i in subset]
        difference = math.fsum(mine) / len(mine) - mean
        out.append(difference / (std + 1e-6) if norm_std else difference)
    return out


@pytest.mark.parametrize("k", [1, 2, 3, 7])
@pytest.mark.parametrize("norm_std", [True, False])
@pytest.mark.parametrize("rewards", [[1, 0, 0, 1, 0, 0, 0], [0.3, -1.0, 2.0, 2.0, 0.0, 0.7, -1.0], [1, 0, 0, 0, 0, 0, 0]])
def test_pass_at_k_against_all_subsets(k, norm_std, rewards):
    cfg = AlgoConfig(advantage="pass_at_k", pass_k=k, norm_std=norm_std)
    twice = torch.tensor([each for each in rewards for _ in range(2)], dtype=torch.float64)  # a second group, mirrored, in between
    twice[1::2] = 1 - twice[1::2]
    got = pass_at_k(twice, torch.tensor([4, -9] * len(rewards)), cfg)
    torch.testing.assert_close(got[::2].tolist(), pass_at_k_by_enumeration(rewards, k, norm_std), rtol=1e-8, atol=1e-8)
    torch.testing.assert_close(got[1::2].tolist(), pass_at_k_by_enumeration([1 - r for r in rewards], k, norm_std), rtol=1e-8, atol=1e-8)


def test_pass_at_k_is_the_papers_formula_for_right_and_wrong():
    n, right, k = 32, 5, 8
    mean = 1 - math.comb(n - right, k) / math.comb(n, k)
    std = math.sqrt(mean * (1 - mean))
    wrong = (1 - mean - math.comb(n - right - 1, k - 1) / math.comb(n - 1, k - 1)) / std
    got = pass_at_k(torch.tensor([1.0] * right + [0.0] * (n - right)).double(), torch.zeros(n), AlgoConfig(pass_k=k))
    assert got.tolist() == pytest.approx([(1 - mean) / std] * right + [wrong] * (n - right), rel=1e-5)


def test_pass_at_k_of_equal_rewards_is_zero_and_small_groups_are_refused():
    assert pass_at_k(torch.full((6,), 0.1), torch.zeros(6), AlgoConfig(pass_k=2)).tolist() == [0.0] * 6
    with pytest.raises(ConfigError, match=r"pass_k=4 .* group of 3; set"):
        pass_at_k(torch.zeros(3), torch.zeros(3), AlgoConfig(pass_k=4))


@pytest.mark.parametrize("name", NAMES)
def test_edges_of_every_advantage(name):
    function = ADVANTAGES.get(name)
    cfg = AlgoConfig(advantage=name, pass_k=1)

    def call(rewards: torch.Tensor, groups: torch.Tensor) -> torch.Tensor:
        lengths = {"lengths": torch.full((len(rewards),), 3)} if getattr(function, "needs_lengths", False) else {}
        return function(rewards, groups, cfg, **lengths)

    assert function.needs_tokens is False
    assert call(torch.zeros(0), torch.zeros(0, dtype=torch.int64)).shape == (0,)
    for value in (0.1, 1 / 3, -7.3e6):
        assert call(torch.full((7,), value), torch.zeros(7, dtype=torch.int64)).abs().max() == 0, value
    one_alone = call(torch.tensor([5.0, 1.0, 2.0]), torch.tensor([0, 1, 1]))
    assert one_alone.isfinite().all() and one_alone.dtype == torch.float32
    assert name == "reinforce_pp" or one_alone[0].abs() < 1e-6
    assert one_alone[2] > one_alone[1]


def test_empty_responses_alone_give_finite_numbers():
    for function in (opo, reinforce_pp, reinforce_pp_baseline):
        assert function(torch.tensor([1.0, 2.0]), torch.tensor([0, 0]), AlgoConfig(), lengths=torch.tensor([0, 0])).isfinite().all()


def test_all_are_registered():
    assert set(ADVANTAGES.names()) == {*NAMES, "gae", "remax"}
    assert ADVANTAGES.get("grpo") is grpo and not grpo.needs_lengths and opo.needs_lengths
