"""Weights of tokens: the right mean, whatever the split into packs and ranks."""

from __future__ import annotations

import random

import pytest
import torch

from megaflow.algo.aggregation import token_weights

LENGTHS = [1, 7, 2, 400, 33, 1, 5000, 64]


def losses(seed: int = 0) -> list[list[float]]:
    rng = random.Random(seed)
    return [[rng.gauss(0, 1) for _ in range(n)] for n in LENGTHS]


def mean_by_hand(aggregation: str, per_seq: list[list[float]]) -> float:
    if aggregation == "token":
        flat = [x for seq in per_seq for x in seq]
        return sum(flat) / len(flat)
    if aggregation == "sequence_sum":
        return sum(sum(seq) for seq in per_seq) / len(per_seq)
    return sum(sum(seq) / len(seq) for seq in per_seq) / len(per_seq)


def weighted_sum(aggregation: str, per_seq: list[list[float]], which: list[int]) -> float:
    """One pack's part, as a rank would compute it (weights fp32, sum in float64)."""
    lengths = torch.tensor([len(per_seq[i]) for i in which], dtype=torch.int64)
    weights = token_weights(lengths, aggregation, total_tokens=sum(LENGTHS), total_seqs=len(LENGTHS))
    return (weights.double() * torch.tensor([x for i in which for x in per_seq[i]], dtype=torch.float64)).sum().item()


@pytest.mark.parametrize("aggregation", ["token", "sequence", "sequence_sum"])
@pytest.mark.parametrize("packs", [
    [[0, 1, 2, 3, 4, 5, 6, 7]],
    [[7], [6], [5], [4], [3], [2], [1], [0]],
    [[0, 6], [], [3, 1, 2], [7, 4, 5]],
])  # fmt: skip
def test_the_mean_does_not_depend_on_the_split(aggregation, packs):
    per_seq = losses()
    total = sum(weighted_sum(aggregation, per_seq, pack) for pack in packs)
    assert total == pytest.approx(mean_by_hand(aggregation, per_seq), rel=1e-6, abs=1e-9)


def test_the_two_means_differ():
    per_seq = losses()
    assert abs(mean_by_hand("token", per_seq) - mean_by_hand("sequence", per_seq)) > 1e-2


def test_weights_written_out():
    lengths = torch.tensor([1, 3])
    assert token_weights(lengths, "token", 8, 4).tolist() == [0.125] * 4
    assert token_weights(lengths, "sequence_sum", 8, 4).tolist() == [0.25] * 4
    assert token_weights(lengths, "sequence", 8, 4).tolist() == pytest.approx([1 / 4, 1 / 12, 1 / 12, 1 / 12])


@pytest.mark.parametrize("aggregation", ["token", "sequence", "sequence_sum"])
def test_an_empty_response_has_no_weight_and_an_empty_pack_none(aggregation):
    assert token_weights(torch.tensor([0, 2, 0]), aggregation, 2, 3).isfinite().all()
    assert token_weights(torch.tensor([0, 2, 0]), aggregation, 2, 3).shape == (2,)
    assert token_weights(torch.zeros(0, dtype=torch.int64), aggregation, 2, 3).shape == (0,)


def test_an_empty_mini_batch_has_no_mean():
    with pytest.raises(AssertionError):
        token_weights(torch.tensor([1]), "token", 0, 0)
