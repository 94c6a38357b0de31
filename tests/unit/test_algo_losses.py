"""The policy loss, its gradients and stats against formulas in plain Python floats (float64)."""

from __future__ import annotations

import math

import pytest
import torch

from megaflow.algo import LOSSES
from megaflow.algo.losses import LossInputs, objective, ppo_clip
from megaflow.config.schema import AlgoConfig, ClipConfig, KLConfig

CLIP = AlgoConfig(clip=ClipConfig(low=0.2, high=0.28))
RATIOS = [0.5, 0.79, 0.81, 1.0, 1.27, 1.29, 3.0]


def inputs_of(old_logp: torch.Tensor, advantage: torch.Tensor, ref_logp: torch.Tensor | None = None) -> LossInputs:
    return LossInputs(
        old_logp=old_logp,
        advantage=advantage,
        rollout_logp=old_logp,
        seq_index=torch.zeros(len(old_logp), dtype=torch.int64),
        num_seqs=1,
        ref_logp=ref_logp,
    )


def pairs() -> tuple[torch.Tensor, torch.Tensor, list[tuple[float, float]]]:
    """Every ratio with a positive, a negative and a zero advantage."""
    cases = [(ratio, advantage) for ratio in RATIOS for advantage in (1.5, -0.7, 0.0)]
    old = torch.linspace(-4, -0.1, len(cases), dtype=torch.float64)
    logp = old + torch.tensor([math.log(ratio) for ratio, _ in cases], dtype=torch.float64)
    return logp.requires_grad_(), old, cases


def by_hand(ratio: float, advantage: float) -> tuple[float, float, bool]:
    """Loss, d loss / d logp and whether the clip took the gradient; d ratio / d logp = ratio."""
    bounded = min(max(ratio, 0.8), 1.28)
    loss = -min(ratio * advantage, bounded * advantage)
    gone = (advantage > 0 and ratio > 1.28) or (advantage < 0 and ratio < 0.8)
    return loss, 0.0 if gone else -ratio * advantage, gone


def test_ppo_clip_values_gradients_and_stats():
    logp, old, cases = pairs()
    advantage = torch.tensor([a for _, a in cases], dtype=torch.float64)
    per_token, stats = ppo_clip(logp, inputs_of(old, advantage), CLIP)
    (gradient,) = torch.autograd.grad(per_token.sum(), logp)
    for i, (ratio, a) in enumerate(cases):
        loss, slope, gone = by_hand(ratio, a)
        assert per_token[i].item() == pytest.approx(loss, rel=1e-12, abs=1e-14), cases[i]
        assert gradient[i].item() == pytest.approx(slope, rel=1e-12, abs=1e-14), cases[i]
        assert stats["clip_frac"][i].item() == float(gone), cases[i]
        assert stats["ratio"][i].item() == pytest.approx(ratio, rel=1e-12)
        assert stats["kl"][i].item() == pytest.approx(ratio - 1 - math.log(ratio), rel=1e-9, abs=1e-14)
    assert not any(value.requires_grad for value in stats.values())


def test_gradient_against_finite_differences():
    logp, old, cases = pairs()
    advantage = torch.tensor([a for _, a in cases], dtype=torch.float64)
    inputs = inputs_of(old, advantage, ref_logp=old + 0.3)
    cfg = AlgoConfig(clip=CLIP.clip, kl=KLConfig(where="loss", estimator="k3", coef=0.5), entropy=0.1)

    def total(values: torch.Tensor) -> torch.Tensor:
        return objective(values, -values.exp() * values, inputs, cfg)[0].sum()  # any smooth function of logp serves as entropy

    assert torch.autograd.gradcheck(total, (logp,), eps=1e-7, atol=1e-6)


def test_on_policy_gradient_is_that_of_reinforce():
    logp = torch.tensor([-1.0, -2.0, -0.5], dtype=torch.float64, requires_grad=True)
    advantage = torch.tensor([2.0, -3.0, 0.5], dtype=torch.float64)
    per_token, stats = ppo_clip(logp, inputs_of(logp.detach(), advantage), CLIP)
    per_token.sum().backward()
    torch.testing.assert_close(logp.grad, -advantage, rtol=0, atol=1e-15)
    assert stats["clip_frac"].sum() == 0 and stats["kl"].abs().max() == 0


def test_a_ratio_beyond_fp32_stays_finite():
    old = torch.tensor([-200.0, -200.0, -0.1])
    logp = torch.tensor([-0.1, -0.1, -200.0], requires_grad=True)
    per_token, stats = ppo_clip(logp, inputs_of(old, torch.tensor([1.0, -1.0, 1.0])), CLIP)
    per_token.sum().backward()
    assert per_token.isfinite().all() and logp.grad.isfinite().all() and stats["kl"].isfinite().all()
    assert per_token[0].item() == pytest.approx(-1.28) and logp.grad[0] == 0  # the clip, not the limit, decides here


def test_objective_adds_kl_and_subtracts_entropy():
    logp = torch.tensor([-1.0, -0.4], dtype=torch.float64)
    ref = torch.tensor([-1.3, -0.1], dtype=torch.float64)
    entropy = torch.tensor([0.9, 0.2], dtype=torch.float64)
    cfg = AlgoConfig(kl=KLConfig(where="loss", estimator="k2", coef=0.25), entropy=0.01)
    per_token, stats = objective(logp, entropy, inputs_of(logp, torch.ones(2, dtype=torch.float64), ref), cfg)
    expected = [-1.0 + 0.25 * 0.045 - 0.01 * 0.9, -1.0 + 0.25 * 0.045 - 0.01 * 0.2]
    torch.testing.assert_close(per_token, torch.tensor(expected, dtype=torch.float64), rtol=1e-12, atol=0)
    torch.testing.assert_close(stats["ref_kl"], torch.full((2,), 0.045, dtype=torch.float64), rtol=1e-12, atol=0)
    assert torch.equal(stats["entropy"], entropy)


def test_kl_in_the_reward_is_measured_but_not_added_to_the_loss():
    logp, ref = torch.tensor([-1.0]), torch.tensor([-2.0])
    per_token, stats = objective(logp, None, inputs_of(logp, torch.ones(1), ref), AlgoConfig(kl=KLConfig(where="reward", coef=10.0)))
    assert per_token.item() == -1.0
    assert stats["ref_kl"].item() == pytest.approx(math.exp(-1) - 1 + 1)
    assert "entropy" not in stats


def test_missing_inputs_are_caught():
    logp = torch.zeros(1)
    inputs = inputs_of(logp, logp)
    with pytest.raises(AssertionError, match="ref_logp"):
        objective(logp, None, inputs, AlgoConfig(kl=KLConfig(where="loss")))
    with pytest.raises(AssertionError, match="entropy"):
        objective(logp, None, inputs, AlgoConfig(entropy=0.1))


def test_no_tokens():
    per_token, stats = ppo_clip(torch.zeros(0), inputs_of(torch.zeros(0), torch.zeros(0)), CLIP)
    assert per_token.shape == (0,) and all(value.shape == (0,) for value in stats.values())


def test_registered():
    assert LOSSES.get("ppo_clip") is ppo_clip
