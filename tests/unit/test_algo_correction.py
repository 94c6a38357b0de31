"""Corrections for the engine's distribution, against loops over sequences in plain floats."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from megaflow.algo.correction import correction, left_out
from megaflow.algo.losses import LossInputs, objective
from megaflow.algo.mismatch import effective_sample_size, mismatch_of_sequence, mismatch_of_step
from megaflow.config.schema import AlgoConfig, CorrectionConfig, KLConfig

LOG_RHO = [[0.3, -0.4, 0.05], [0.9], [-0.9, 0.1, -0.3, -0.2], [0.0, 0.0], [0.6, -2.5, 2.2]]
LENGTHS = [len(each) for each in LOG_RHO]
LOW, HIGH = 0.5, 2.0


def by_hand(mode: str) -> tuple[list[float], list[float]]:
    weights, cut = [], []
    for sequence in LOG_RHO:
        product, geometric = math.exp(sum(sequence)), math.exp(sum(sequence) / len(sequence))
        for each in sequence:
            level = {"sequence": product, "geometric": geometric}
            rho = level.get(mode.partition("_")[0], math.exp(each))
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


MODES = ["token_tis", "sequence_tis", "geometric_tis", "token_mask", "sequence_mask", "geometric_mask", "icepop"]


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


REJECTIONS = ["sequence", "geometric", "worst"]


def rejected_by_hand(reject: str) -> list[bool]:
    """Which of the sequences of LOG_RHO are out of [0.6, 1.8]."""
    out = []
    for sequence in LOG_RHO:
        ratios = [math.exp(each) for each in sequence]
        measured = {"sequence": [math.prod(ratios)], "geometric": [math.prod(ratios) ** (1 / len(ratios))], "worst": ratios}[reject]
        out.append(any(not 0.6 <= each <= 1.8 for each in measured))
    return out


@pytest.mark.parametrize("reject", REJECTIONS)
@pytest.mark.parametrize("mode", ["none", "token_tis", "geometric_mask"])
def test_outlying_sequences_are_rejected_whatever_the_mode(mode, reject):
    _, x = inputs()
    cfg = CorrectionConfig(mode, LOW, HIGH, reject, 0.6, 1.8)
    arguments = (x.old_logp, x.rollout_logp, x.seq_index, x.num_seqs, cfg)
    weight, stats = correction(*arguments)
    gone = rejected_by_hand(reject)
    assert 0 < sum(gone) < len(gone), "the case must reach both branches"
    weights, cut = by_hand(mode) if mode != "none" else ([1.0] * sum(LENGTHS), [0.0] * sum(LENGTHS))
    by_token = [each for each, length in zip(gone, LENGTHS, strict=True) for _ in range(length)]
    assert weight.tolist() == pytest.approx([0.0 if out else w for w, out in zip(weights, by_token, strict=True)], rel=1e-12)
    assert stats["correction_cut"].tolist() == [float(c or out) for c, out in zip(cut, by_token, strict=True)]
    masked = [not LOW <= math.exp(sum(each) / len(each)) <= HIGH for each in LOG_RHO] if mode == "geometric_mask" else [False] * len(gone)
    assert left_out(*arguments).tolist() == [a or b for a, b in zip(gone, masked, strict=True)]


def test_rejection_alone_reaches_the_objective():
    logp, x = inputs()
    cfg = AlgoConfig(correction=CorrectionConfig(reject="worst", reject_low=0.6, reject_high=1.8))
    per_token, stats = objective(logp, None, x, cfg)
    gone = torch.tensor(rejected_by_hand("worst"))[x.seq_index]
    assert (per_token[gone] == 0).all() and (per_token[~gone] != 0).all()
    assert stats["correction_weight"].tolist() == (~gone).double().tolist()


def measured(old: list[torch.Tensor], rollout: list[torch.Tensor], cfg: CorrectionConfig | None = None) -> dict[str, float]:
    sequences = [mismatch_of_sequence(a, b, cfg or CorrectionConfig()) for a, b in zip(old, rollout, strict=True)]
    return mismatch_of_step(sequences, sum(map(len, old)))


def test_mismatch_ratio_chi2_and_effective_sample_size():
    """By exact expectation: the tokens are all of a small vocabulary, each as often as the engine draws it."""
    trainer, engine = [0.1, 0.2, 0.7], [0.2, 0.3, 0.5]
    counts = [2, 3, 5]  # engine's probabilities, of 10 draws
    old = [torch.tensor([math.log(p)] * n) for p, n in zip(trainer, counts, strict=True)]
    rollout = [torch.tensor([math.log(q)] * n) for q, n in zip(engine, counts, strict=True)]
    got = measured(old, rollout)
    chi2 = sum((p - q) ** 2 / q for p, q in zip(trainer, engine, strict=True))
    assert got["mismatch/ratio"] == pytest.approx(1.0, rel=1e-6)
    assert got["mismatch/chi2"] == pytest.approx(chi2, rel=1e-5)
    assert got["mismatch/kl"] == pytest.approx(sum(q * math.log(q / p) for p, q in zip(trainer, engine, strict=True)), rel=1e-5)
    assert got["mismatch/k3"] == pytest.approx(got["mismatch/kl"], rel=1e-5), "both are unbiased, and this is the expectation"
    rho = [p / q for p, q, n in zip(trainer, engine, counts, strict=True) for _ in range(n)]
    assert got["mismatch/ess"] == pytest.approx(sum(rho) ** 2 / sum(r * r for r in rho) / len(rho), rel=1e-5)
    assert (got["mismatch/ratio_max"], got["mismatch/ratio_min"]) == pytest.approx((0.7 / 0.5, 0.1 / 0.2), rel=1e-6)
    products = [(p / q) ** n for p, q, n in zip(trainer, engine, counts, strict=True)]
    assert got["mismatch/chi2_seq"] == pytest.approx(sum(w * w for w in products) / 3 - 1, rel=1e-5)
    assert effective_sample_size(1.0, 0.0) == 1.0


def test_mismatch_is_a_mean_over_tokens_not_over_sequences():
    got = measured([torch.tensor([-1.0]), torch.tensor([-1.0, -1.0, -1.0])], [torch.tensor([-1.5]), torch.tensor([-1.0, -1.0, -0.9])])
    k3 = [math.exp(0.5) - 1 - 0.5, 0.0, 0.0, math.exp(-0.1) - 1 + 0.1]
    assert got["mismatch/logp_abs_diff"] == pytest.approx(0.6 / 4, rel=1e-6)
    assert got["mismatch/k3"] == pytest.approx(sum(k3) / 4, rel=1e-5)


def test_mismatch_is_zero_when_equal_and_nan_without_tokens():
    same, ones = torch.tensor([-0.3, -4.0]), ("ratio", "ess", "ratio_max", "ratio_min")
    got = measured([same, torch.zeros(0)], [same, torch.zeros(0)])
    assert got == {name: float(name.removeprefix("mismatch/") in ones) for name in got} and len(got) == 9
    empty = measured([torch.zeros(0)], [torch.zeros(0)])
    assert empty.keys() == got.keys() and all(math.isnan(value) for value in empty.values())
    assert mismatch_of_step([], 0) == {}


@pytest.mark.parametrize("cfg, gone", [
    (CorrectionConfig("sequence_mask", LOW, HIGH), [not LOW <= math.exp(sum(each)) <= HIGH for each in LOG_RHO]),
    (CorrectionConfig("token_tis", LOW, HIGH, "worst", 0.6, 1.8), rejected_by_hand("worst")),
])  # fmt: skip
def test_rejected_sequences_are_counted(cfg, gone):
    _, x = inputs()
    got = measured(list(x.old_logp.split(LENGTHS)), list(x.rollout_logp.split(LENGTHS)), cfg)
    assert got["mismatch/rejected"] == sum(gone) / len(gone)
    assert "mismatch/rejected" not in measured([x.old_logp], [x.rollout_logp], CorrectionConfig("token_tis"))
