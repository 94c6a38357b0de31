"""Lengths in the reward, the greedy baseline, pass@k and the vote: by hand, from the papers, or by trying all subsets."""

from __future__ import annotations

import itertools

import pytest
import torch

from megaflow.algo.best_of import majority_solved, pass_probability
from megaflow.algo.remax import remax
from megaflow.algo.shaping import group_length_reward, length_shaping, overlong_punishment, own_length_shaping
from megaflow.config.schema import AlgoConfig, LengthConfig, OverlongConfig


def test_overlong_punishment_with_the_numbers_of_the_paper():
    """DAPO: no punishment up to 16,384 tokens, -1 at 20,480, half way between them -0.5."""
    lengths = torch.tensor([1, 16384, 16385, 18432, 20479, 20480, 30000])
    found = overlong_punishment(lengths, 20480, 4096.0)
    assert found.tolist() == pytest.approx([0, 0, -1 / 4096, -0.5, -4095 / 4096, -1, -1], abs=1e-15)


def test_group_length_reward_by_hand():
    """Kimi k1.5: 0.5 - (length - shortest) / (longest - shortest) for a right answer, and no more than 0 for a wrong one."""
    lengths = torch.tensor([10, 30, 20, 15, 7, 7])
    groups = torch.tensor([4, 4, 4, 4, 9, 9])
    solved = torch.tensor([True, True, False, False, True, False])
    found = group_length_reward(lengths, groups, solved)
    assert found.tolist() == [0.5, -0.5, 0.0, 0.0, 0.0, 0.0]  # 15 tokens, wrong: min(0, 0.25); one length in the second group
    assert group_length_reward(torch.tensor([10, 30]), torch.tensor([0, 0]), torch.tensor([False, False])).tolist() == [0.0, -0.5]


def test_terms_are_those_that_are_asked_for():
    groups, lengths, solved = torch.tensor([0, 0]), torch.tensor([4, 10]), torch.tensor([True, True])
    assert length_shaping(groups, lengths, solved, AlgoConfig(), 10) == {}
    both = AlgoConfig(overlong=OverlongConfig(buffer=0.5, penalty=2.0), length=LengthConfig("linear", 0.3))
    found = length_shaping(groups, lengths, solved, both, 10)
    assert {name: term.tolist() for name, term in found.items()} == {"overlong": [0.0, -2.0], "length": pytest.approx([-0.12, -0.3])}
    own = own_length_shaping(lengths, both, 10)
    assert all(torch.equal(own[name], found[name]) for name in found) and own.keys() == found.keys()
    group = AlgoConfig(length=LengthConfig("group", 0.2))
    assert length_shaping(groups, lengths, solved, group, 10)["length"].tolist() == pytest.approx([0.1, -0.1])
    assert own_length_shaping(lengths, group, 10) == {}


def test_remax_is_the_reward_less_the_greedy_ones():
    rewards, baseline = torch.tensor([1.0, 0.0, 0.25, 1.0]), torch.tensor([1.0, 1.0, 0.0, 0.5])
    groups = torch.tensor([0, 0, 1, 2])
    assert remax(rewards, groups, AlgoConfig(), baseline=baseline).tolist() == [0.0, -1.0, 0.25, 0.5]
    assert remax.needs_greedy and not remax.needs_tokens


@pytest.mark.parametrize(("n", "c"), [(5, 0), (5, 1), (6, 2), (6, 5), (4, 4)])
def test_pass_probability_is_the_part_of_all_subsets_with_a_right_one(n: int, c: int):
    for k in range(1, n + 1):
        subsets = list(itertools.combinations([True] * c + [False] * (n - c), k))
        assert pass_probability(n, c, k) == pytest.approx(sum(map(any, subsets)) / len(subsets), abs=1e-15)


def test_pass_probability_of_known_cases():
    assert pass_probability(10, 3, 1) == pytest.approx(0.3)
    assert pass_probability(200, 1, 100) == pytest.approx(0.5)  # one right of 200: half of the subsets of 100 hold it
    assert pass_probability(4, 2, 2) == pytest.approx(5 / 6)


@pytest.mark.parametrize(
    ("answers", "solved", "value"),
    [
        (["7", "7", "3"], [True, True, False], 1.0),
        (["7", "3", "3"], [True, False, False], 0.0),
        (["7", "3"], [True, False], 0.5),
        (["7", "7", "3", "3", "5"], [True, True, False, False, False], 0.5),
        ([None, None, "7"], [False, False, True], 1.0),
        ([None, None], [False, False], 0.0),
        (["7", "7", "3"], [True, False, False], 0.5),
    ],
)
def test_majority(answers, solved, value):
    assert majority_solved(answers, solved) == value
