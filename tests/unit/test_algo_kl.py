"""KL estimators against exact expectations over small categorical distributions, in float64."""

from __future__ import annotations

import math

import pytest
import torch

from megaflow.algo.kl import kl_estimate
from megaflow.algo.kl_control import AdaptiveKL, FixedKL, controller
from megaflow.config.schema import KLConfig

POLICY_LOGITS = torch.tensor([0.3, -1.0, 0.8, 0.0], dtype=torch.float64)
REF = torch.log_softmax(torch.tensor([0.0, -0.2, 0.5, 0.4], dtype=torch.float64), 0)


def exact_kl(p: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
    return (p.exp() * (p - q)).sum()


@pytest.mark.parametrize("estimator", ["k1", "k3", "k1+", "k3+"])
def test_unbiased(estimator):
    policy = torch.log_softmax(POLICY_LOGITS, 0)
    expectation = (policy.exp() * kl_estimate(policy, REF, estimator)).sum()
    torch.testing.assert_close(expectation, exact_kl(policy, REF), rtol=1e-12, atol=0)


@pytest.mark.parametrize("estimator, formula", [
    ("k1", lambda logr: -logr),
    ("k2", lambda logr: logr**2 / 2),
    ("k3", lambda logr: math.exp(logr) - 1 - logr),
    ("abs", abs),
    ("k1+", lambda logr: -logr),
    ("k3+", lambda logr: math.exp(logr) - 1 - logr),
])  # fmt: skip
def test_values(estimator, formula):
    log_ratios = [-3.0, -0.5, 0.0, 1e-3, 0.7, 2.0]
    logp = torch.full((len(log_ratios),), -5.0, dtype=torch.float64)
    got = kl_estimate(logp, logp + torch.tensor(log_ratios, dtype=torch.float64), estimator)
    assert got.tolist() == pytest.approx([formula(x) for x in log_ratios], rel=1e-9, abs=1e-15)


def test_gradients_as_losses():
    """In expectation over the policy: k1's vanishes, k2's is that of KL(policy||ref), k3's that of KL(ref||policy)."""

    def expected_gradient(estimator: str) -> torch.Tensor:
        logits = POLICY_LOGITS.clone().requires_grad_()
        policy = torch.log_softmax(logits, 0)
        weighted = (policy.detach().exp() * kl_estimate(policy, REF, estimator)).sum()  # sampling is not differentiated
        return torch.autograd.grad(weighted, logits)[0]

    def exact_gradient(reverse: bool) -> torch.Tensor:
        logits = POLICY_LOGITS.clone().requires_grad_()
        policy = torch.log_softmax(logits, 0)
        return torch.autograd.grad(exact_kl(policy, REF) if reverse else exact_kl(REF, policy), logits)[0]

    torch.testing.assert_close(expected_gradient("k1"), torch.zeros(4, dtype=torch.float64), rtol=0, atol=1e-15)
    torch.testing.assert_close(expected_gradient("k2"), exact_gradient(reverse=True), rtol=1e-10, atol=1e-14)
    torch.testing.assert_close(expected_gradient("k3"), exact_gradient(reverse=False), rtol=1e-10, atol=1e-14)
    for straight_through in ("k1+", "k3+"):
        torch.testing.assert_close(expected_gradient(straight_through), exact_gradient(reverse=True), rtol=1e-10, atol=1e-14)
    assert not torch.allclose(exact_gradient(True), exact_gradient(False))


@pytest.mark.parametrize("estimator, slope", [
    ("abs", lambda logr: -1.0 if logr > 0 else 1.0 if logr < 0 else 0.0),
    ("k1+", lambda logr: -logr),
    ("k3+", lambda logr: -logr),
])  # fmt: skip
def test_gradients_of_each_token(estimator, slope):
    log_ratios = [-25.0, -3.0, -0.5, 0.0, 0.7, 2.0, 25.0]  # beyond the limits, where k3 itself has no gradient, the plus keeps one
    logp = torch.full((len(log_ratios),), -5.0, dtype=torch.float64, requires_grad=True)
    kl_estimate(logp, logp.detach() + torch.tensor(log_ratios, dtype=torch.float64), estimator).sum().backward()
    assert logp.grad.tolist() == pytest.approx([slope(x) for x in log_ratios], rel=1e-12)


def test_k3_is_precise_in_fp32_near_zero_and_bounded_far_away():
    logp = torch.tensor([-1.0, -1.0, -30.0, -1.0], requires_grad=True)
    ref = torch.tensor([-1.0 + 2**-12, -1.0, -1.0, -500.0])
    k3 = kl_estimate(logp, ref, "k3")
    assert k3[0].item() == pytest.approx(2**-25, rel=2e-3)  # log_r^2 / 2; with exp(x) - 1 - x in fp32 nothing of it is left
    assert k3[1].item() == 0
    assert k3[2].item() == 10 and k3[3].item() == 10  # verl's bound
    k3.sum().backward()
    assert logp.grad.isfinite().all()


def test_the_adaptive_coefficient_follows_ziegler():
    """Section 2.2, in steps of the published code: 1 + clip(kl / target - 1, -0.2, 0.2) * samples / horizon."""
    control, coef = AdaptiveKL(coef=0.2, target=6.0, horizon=10_000), 0.2
    for kl, error in [(6.0, 0.0), (6.6, 0.1), (60.0, 0.2), (0.0, -0.2), (5.7, -0.05), (-1.0, -0.2)]:
        coef *= 1 + error * 256 / 10_000
        assert control.update(kl, 256) == pytest.approx(coef, rel=1e-12) and control.coef == pytest.approx(coef, rel=1e-12)
    resumed = AdaptiveKL(coef=9.0, target=6.0, horizon=10_000)
    resumed.load_state_dict(control.state_dict())
    assert resumed.update(7.0, 64) == control.update(7.0, 64)
    with pytest.raises(AssertionError):
        AdaptiveKL(coef=0.2, target=0.0, horizon=1)


def test_the_adaptive_coefficient_holds_a_kl_at_its_target():
    """A policy whose KL is 1 / coef settles at coef = 1 / target."""
    control = AdaptiveKL(coef=10.0, target=0.5, horizon=1000)
    for _ in range(500):
        control.update(1 / control.coef, 100)
    assert control.coef == pytest.approx(2.0, rel=1e-3)


def test_a_step_without_a_number_leaves_the_coefficient():
    control = AdaptiveKL(coef=0.2, target=0.1, horizon=100)
    assert control.update(math.nan, 100) == 0.2 and control.update(math.inf, 100) == 0.2


def test_the_fixed_coefficient_stays_and_a_resumed_run_may_set_another():
    control = FixedKL(0.05)
    assert [control.update(kl, 10) for kl in (0.0, 100.0)] == [0.05, 0.05]
    other = FixedKL(1.0)
    other.load_state_dict(control.state_dict())
    assert other.coef == 1.0


def test_the_controller_by_name_also_over_a_change_of_controller():
    assert controller(KLConfig(coef=0.3)) == FixedKL(0.3)
    adaptive = controller(KLConfig(coef=0.3, controller="adaptive", target=0.2, horizon=50))
    assert adaptive == AdaptiveKL(0.3, 0.2, 50)
    adaptive.load_state_dict(FixedKL(9.0).state_dict())
    assert adaptive.coef == 0.3
