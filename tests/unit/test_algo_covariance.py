"""Clip-Cov and KL-Cov against float64 code written from arXiv:2505.22617, and the choice of tokens over ranks."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
import torch

from megaflow.algo import covariance as cov
from megaflow.algo.losses import LossInputs, clip_cov, kl_cov
from megaflow.config.schema import AlgoConfig, ClipConfig, CovConfig
from megaflow.trainer.marking import mark_tokens
from megaflow.types import Prompt, Sample

LENGTHS = [7, 3, 11, 0, 6, 9, 4, 8]
PART = 0.25  # of 48 tokens: 12
CFG = {name: AlgoConfig(loss=name, clip=ClipConfig(0.2, 0.28), cov=CovConfig(PART, 0.2, 1.5, PART, 0.7)) for name in ("clip_cov", "kl_cov")}


def samples() -> list[Sample]:
    generator = torch.Generator().manual_seed(3)
    made = []
    for i, length in enumerate(LENGTHS):
        s = Sample(Prompt(f"p:{i // 2}", [1], "?"), i // 2, i % 2, torch.zeros(length).long(), torch.zeros(length), "stop", 0)
        s.old_logp = -3 * torch.rand(length, generator=generator)
        s.advantage = [1.3, -0.7, 0.2, -2.0][i % 4]
        made.append(s)
    return made


def covariances(found: list[Sample]) -> list[float]:
    """Equation 10 in plain floats, over all tokens given."""
    logp = [x for s in found for x in s.old_logp.double().tolist()]
    advantage = [s.advantage for s in found for _ in range(s.num_response)]
    mean_logp, mean_advantage = sum(logp) / len(logp), sum(advantage) / len(advantage)
    return [(x - mean_logp) * (a - mean_advantage) for x, a in zip(logp, advantage, strict=True)]


class Ranks:
    """Threads that stand for data-parallel ranks: all_gather and sum as Mesh has them."""

    def __init__(self, size: int):
        self.size, self.barrier, self.box = size, threading.Barrier(size), [None] * size

    def mesh(self, rank: int) -> SimpleNamespace:
        def all_gather(value):
            self.box[rank] = value
            self.barrier.wait(10)
            found = list(self.box)
            self.barrier.wait(10)
            return found

        def total(values):
            found = all_gather(values)
            return {name: sum(each[name] for each in found) for name in values}

        dp = SimpleNamespace(index=rank)
        return SimpleNamespace(rank=rank, dp=dp, replicas=[[r] for r in range(self.size)], all_gather=all_gather, sum=total)


def marks(loss: str, split: list[list[int]], seed: tuple[int, int] = (5, 1)) -> torch.Tensor:
    """The marked tokens of all samples in order, rank r holding the samples split[r]."""
    found, ranks = samples(), Ranks(len(split))
    with ThreadPoolExecutor(len(split)) as pool:
        held = [[found[i] for i in part] for part in split]
        jobs = [pool.submit(mark_tokens, ranks.mesh(r), part, CFG[loss], seed) for r, part in enumerate(held)]
        for job in jobs:
            job.result(30)
    return torch.cat([s.marked for s in found])


ALONE = [list(range(8))]


def test_kl_cov_marks_the_largest_covariances_of_all_tokens():
    by_rank = sorted(range(48), key=lambda t: -covariances(samples())[t])
    assert marks("kl_cov", ALONE).nonzero()[:, 0].tolist() == sorted(by_rank[:12])


def test_clip_cov_marks_at_random_within_the_bounds():
    values = covariances(samples())
    inside = {t for t in range(48) if 0.2 <= values[t] <= 1.5}
    assert 13 < len(inside) < 35, "the case must leave a choice"
    found = [frozenset(marks("clip_cov", ALONE, (seed, step)).nonzero()[:, 0].tolist()) for seed in range(6) for step in range(25)]
    assert all(len(each) == 12 and each <= inside for each in found)
    assert len(set(found)) > 100, "another seed or step draws others"
    times = [sum(t in each for each in found) for t in inside]
    expected = 150 * 12 / len(inside)
    assert all(0.6 * expected < n < 1.4 * expected for n in times), "each equally often, to 4 standard deviations or so"


@pytest.mark.parametrize("loss", ["clip_cov", "kl_cov"])
def test_the_choice_does_not_depend_on_the_split(loss):
    expected = marks(loss, ALONE)
    assert expected.sum() == 12
    for split in ([[0, 1, 2, 3], [4, 5, 6, 7]], [[6, 1, 3], [7, 0], [5, 4, 2]], [[], [3, 2, 1, 0, 7, 6, 5, 4]]):
        assert torch.equal(marks(loss, split), expected), split
    assert torch.equal(marks(loss, ALONE), expected), "the same seed draws the same"


def test_each_mini_batch_is_chosen_from_by_itself():
    found = samples()
    for s in found:
        s.mini_batch = s.group // 2
    mark_tokens(Ranks(1).mesh(0), found, CFG["kl_cov"], (0, 0))
    for part in (found[:4], found[4:]):
        values = covariances(part)
        best = sorted(range(len(values)), key=lambda t: -values[t])[: int(PART * len(values))]
        assert torch.cat([s.marked for s in part]).nonzero()[:, 0].tolist() == sorted(best)


def test_at_least_one_token_and_none_without_a_choice():
    found = samples()
    mark_tokens(Ranks(1).mesh(0), found, AlgoConfig(loss="kl_cov", cov=CovConfig(kl_ratio=2e-4)), (0, 0))
    assert sum(int(s.marked.sum()) for s in found) == 1
    others = samples()
    mark_tokens(Ranks(1).mesh(0), others, AlgoConfig(loss="ppo_clip"), (0, 0))
    assert all(s.marked is None for s in others)
    none = AlgoConfig(loss="clip_cov", cov=CovConfig(low=50.0, high=60.0))
    mark_tokens(Ranks(1).mesh(0), found, none, (0, 0))
    assert not any(s.marked.any() for s in found)


def test_token_level_advantages_count_token_by_token():
    found = samples()
    for s in found:
        s.advantage = torch.linspace(-1, 1, s.num_response) if s.num_response else torch.zeros(0)
    mark_tokens(Ranks(1).mesh(0), found, CFG["kl_cov"], (0, 0))
    logp = torch.cat([s.old_logp for s in found]).double()
    advantage = torch.cat([s.advantage for s in found]).double()
    best = ((logp - logp.mean()) * (advantage - advantage.mean())).topk(12).indices
    assert torch.cat([s.marked for s in found]).nonzero()[:, 0].tolist() == sorted(best.tolist())


def of_the_papers(loss: str, logp: torch.Tensor, inputs: LossInputs) -> torch.Tensor:
    """Per token. Equation 12: ratio * A with PPO's clip, 0 in I_clip. Equation 14: ratio * A, minus beta * distance in I_KL."""
    terms = []
    for x, old, a, marked in zip(logp, inputs.old_logp, inputs.advantage, inputs.marked, strict=True):
        ratio = (x - old).exp()
        if loss == "clip_cov":
            kept = torch.minimum(ratio * a, ratio.clamp(0.8, 1.28) * a)
            terms.append(-kept if not marked else 0.0 * x)
        else:
            terms.append(-(ratio * a - (0.7 * (x - old).abs() if marked else 0.0)))
    return torch.stack(terms)


@pytest.mark.parametrize("loss, function", [("clip_cov", clip_cov), ("kl_cov", kl_cov)])
def test_values_and_gradients(loss, function):
    generator = torch.Generator().manual_seed(0)
    old = -3 * torch.rand(48, generator=generator, dtype=torch.float64)
    logp = (old + 0.4 * torch.randn(48, generator=generator, dtype=torch.float64)).requires_grad_()
    advantage = torch.randn(48, generator=generator, dtype=torch.float64)
    marked = marks(loss, ALONE)
    inputs = LossInputs(old, advantage, old, torch.zeros(48).long(), 1, marked=marked)
    per_token, stats = function(logp, inputs, CFG[loss])
    expected = of_the_papers(loss, logp, inputs)
    torch.testing.assert_close(per_token, expected, rtol=1e-12, atol=1e-14)
    found, wanted = (torch.autograd.grad(each.sum(), logp, retain_graph=True)[0] for each in (per_token, expected))
    torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-14)
    assert torch.equal(stats["cov_marked"].bool(), marked) and not any(value.requires_grad for value in stats.values())
    if loss == "clip_cov":
        assert (found[marked] == 0).all() and (found[~marked] != 0).any()


@pytest.mark.parametrize("function", [clip_cov, kl_cov])
def test_marks_are_asked_for(function):
    one = torch.zeros(1)
    with pytest.raises(AssertionError, match="marked"):
        function(one, LossInputs(one, one, one, torch.zeros(1).long(), 1), AlgoConfig())


def test_draws_depend_on_names_alone():
    assert torch.equal(cov.draws(5, 1, 2, 3, 4), cov.draws(5, 1, 2, 3, 4))
    assert not torch.equal(cov.draws(5, 1, 2, 3, 4), cov.draws(5, 1, 2, 4, 3))
    assert torch.equal(cov.draws(9, 1, 2, 3, 4)[:5], cov.draws(5, 1, 2, 3, 4)), "a longer response does not change its beginning's"
