"""Corrections for the engine's distribution, against loops over sequences in plain floats."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from megaflow.algo.correction import correction
from megaflow.algo.losses import LossInputs, objective
from megaflow.algo.mismatch import effective_sample_size, mismatch
from megaflow.config.schema import AlgoConfig, CorrectionConfig, KLConfig

LOG_RHO = [[0.3, -0.4, 0.05], [0.9], [-0.9, 0.1, -0.3, -0.2], [0.0, 0.0], [0.6, -2.5, 2.2]]
LENGTHS = [len(each) for each in LOG_RHO]
LOW, HIGH = 0.5, 2.0


def by_hand(mode: str) -> tuple[list[float], list[float]]:
    weights, cut = [], []
    for sequence in LOG_RHO:
        product, geometric = math.exp(sum(sequence)), math.exp(sum(sequence) / len(sequence))
        for each in sequence:
            rho = {"sequence_tis": product, "sequence_mask": product, "geometric_mask": geometric}.get(mode, math.exp(each))
            inside = LOW <= rho <= HIGH
            weights.append(min(rho, HIGH) if mode.endswith("_tis") else 0.0 if not inside else rho if mode == "icepop" else 1.0)
            cut.append(float(rho > HIGH if mode.endswith("_tis") else not inside))
    return weights, cut


def inputs(requires_grad: bool = False) -> tuple[torch.Tensor, LossInputs]:
    log_rho = torch.tensor([x for sequence in LOG_RHO for x in sequence], dtype=torch.float64)
    rollout = torch.linspace(-3, -0.2, len(log_rho), dtype=torch.float64)
    old = rollout + log_rho
    seq_index = torch.arange(len(LENGTHS)).repeat_interleave(torch.tensor(LENGTHS))
    advantage = torch.linspace(-1, 2, len(log_rho), dtype=torch.float64)
    logp = (old + 0.01).requires_grad_()
    return logp, LossInputs(old, advantage, rollout, seq_index, len(LENGTHS), ref_logp=old - 0.1)


MODES = ["token_tis", "sequence_tis", "token_mask", "sequence_mask", "geometric_mask", "icepop"]


@pytest.mark.parametrize("mode", MODES)
def test_weights_and_stats(mode):
    _, x = inputs()
    weight, stats = correction(x.old_logp, x.rollout_logp, x.seq_index, x.num_seqs, CorrectionConfig(mode, LOW, HIGH))
    expected, cut = by_hand(mode)
    assert weight.tolist() == pytest.approx(expected, rel=1e-12)
    assert stats["correction_weight"].tolist() == weight.tolist() and stats["correction_cut"].tolist() == cut
    assert 0 < sum(cut) < len(cut), "the case must reach both branches"


@pytest.mark.parametrize("mode", MODES)
def test_it_multiplies_the_policy_loss_alone_and_its_gradient(mode):
    logp, x = inputs()
    plain = AlgoConfig(kl=KLConfig(where="loss", estimator="k2", coef=0.3), entropy=0.01)
    corrected = replace(plain, correction=CorrectionConfig(mode, LOW, HIGH))
    entropy = torch.full_like(x.old_logp, 0.7)
    policy_only, _ = objective(logp, None, x, AlgoConfig())
    without, stats_without = objective(logp, entropy, x, plain)
    with_it, stats = objective(logp, entropy, x, corrected)
    expected = torch.tensor(by_hand(mode)[0], dtype=torch.float64)
    torch.testing.assert_close(with_it, without + (expected - 1) * policy_only, rtol=1e-10, atol=1e-12)
    gradients = [torch.autograd.grad(each.sum(), logp, retain_graph=True)[0] for each in (policy_only, without, with_it)]
    torch.testing.assert_close(gradients[2], gradients[1] + (expected - 1) * gradients[0], rtol=1e-10, atol=1e-12)
    assert stats.keys() - stats_without.keys() == {"correction_weight", "correction_cut"}


@pytest.mark.parametrize("mode", MODES)
def test_equal_distributions_need_none_and_far_ones_stay_finite(mode):
    cfg = CorrectionConfig(mode, LOW, HIGH)
    logp, index = torch.tensor([-0.3, -4.0, -1.0]), torch.tensor([0, 0, 1])
    assert correction(logp, logp, index, 2, cfg)[0].tolist() == [1.0] * 3
    weight, stats = correction(torch.zeros(3), torch.tensor([-300.0, -300.0, 300.0]), index, 2, cfg)
    assert weight.isfinite().all() and weight.dtype == torch.float32 and stats["correction_cut"][:2].tolist() == [1.0, 1.0]
    assert correction(torch.zeros(0), torch.zeros(0), torch.zeros(0, dtype=torch.int64), 2, cfg)[0].shape == (0,)


def test_no_gradient_flows_through_the_weight():
    _, x = inputs()
    old = x.old_logp.requires_grad_()
    weight, stats = correction(old, x.rollout_logp, x.seq_index, x.num_seqs, CorrectionConfig("icepop", LOW, HIGH))
    assert not weight.requires_grad and not any(value.requires_grad for value in stats.values())


def test_importance_weights_make_the_expectation_right():
    """Under token_tis without a bound that matters, the mean over the engine's distribution is that over the trainer's."""
    trainer = torch.tensor([0.1, 0.2, 0.3, 0.4], dtype=torch.float64)
    engine = torch.tensor([0.2, 0.15, 0.35, 0.3], dtype=torch.float64)
    payoff = torch.tensor([3.0, -1.0, 0.5, 2.0], dtype=torch.float64)
    cfg = CorrectionConfig("token_tis", high=100.0)
    weight, _ = correction(trainer.log(), engine.log(), torch.arange(4), 4, cfg)
    assert (engine * weight * payoff).sum().item() == pytest.approx((trainer * payoff).sum().item(), rel=1e-12)


def test_mismatch_ratio_chi2_and_effective_sample_size():
    """By exact expectation: the tokens are all of a small vocabulary, each as often as the engine draws it."""
    trainer, engine = [0.1, 0.2, 0.7], [0.2, 0.3, 0.5]
    counts = [2, 3, 5]  # engine's probabilities, of 10 draws
    old = [torch.tensor([math.log(p)] * n) for p, n in zip(trainer, counts, strict=True)]
    rollout = [torch.tensor([math.log(q)] * n) for q, n in zip(engine, counts, strict=True)]
    got = mismatch(old, rollout)
    chi2 = sum((p - q) ** 2 / q for p, q in zip(trainer, engine, strict=True))
    assert got["mismatch/ratio"] == pytest.approx(1.0, rel=1e-6)
    assert got["mismatch/chi2"] == pytest.approx(chi2, rel=1e-5)
    rho = [p / q for p, q, n in zip(trainer, engine, counts, strict=True) for _ in range(n)]
    kish = sum(rho) ** 2 / sum(r * r for r in rho) / len(rho)
    assert effective_sample_size(got["mismatch/ratio"], got["mismatch/chi2"]) == pytest.approx(kish, rel=1e-5)
    assert effective_sample_size(1.0, 0.0) == 1.0
