"""Every loss beside ppo_clip: value and gradient against plain floats written from the papers, and by finite differences."""

from __future__ import annotations

import math

import pytest
import torch

from megaflow.algo import LOSSES
from megaflow.algo.aggregation import token_weights
from megaflow.algo.losses import LossInputs, cispo, dual_clip, gspo, objective, policy_gradient, ppo_clip, sapo
from megaflow.config.schema import AlgoConfig, ClipConfig, SapoConfig

CFG = AlgoConfig(clip=ClipConfig(low=0.2, high=0.28, dual=3.0), sapo=SapoConfig(tau_pos=1.0, tau_neg=1.05))
RATIOS = [0.05, 0.5, 0.79, 0.81, 1.0, 1.27, 1.29, 2.9, 3.1, 12.0]
CASES = [(ratio, advantage) for ratio in RATIOS for advantage in (1.5, -0.7, 0.0)]


def inputs_of(old: torch.Tensor, advantage: torch.Tensor, lengths: list[int] | None = None) -> LossInputs:
    lengths = lengths or [len(old)]
    seq_index = torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths))
    return LossInputs(old_logp=old, advantage=advantage, rollout_logp=old, seq_index=seq_index, num_seqs=len(lengths))


def setting() -> tuple[torch.Tensor, LossInputs]:
    old = torch.linspace(-4, -0.1, len(CASES), dtype=torch.float64)
    logp = old + torch.tensor([math.log(ratio) for ratio, _ in CASES], dtype=torch.float64)
    return logp.requires_grad_(), inputs_of(old, torch.tensor([a for _, a in CASES], dtype=torch.float64))


def clip_by_hand(ratio: float, a: float) -> tuple[float, float, bool]:
    """Value, d value / d logp (d ratio / d logp = ratio), clipped."""
    bounded = min(max(ratio, 0.8), 1.28)
    gone = (a > 0 and ratio > 1.28) or (a < 0 and ratio < 0.8)
    return -min(ratio * a, bounded * a), 0.0 if gone else -ratio * a, gone


def dual_by_hand(ratio: float, a: float, logp: float) -> tuple[float, float, bool]:
    value, slope, gone = clip_by_hand(ratio, a)
    if a < 0 and value > 3.0 * -a:  # the paper: max(min(...), c * A), A < 0
        return 3.0 * -a, 0.0, True
    return value, slope, gone


def policy_gradient_by_hand(ratio: float, a: float, logp: float) -> tuple[float, float, bool]:
    return -a * logp, -a, False


def cispo_by_hand(ratio: float, a: float, logp: float) -> tuple[float, float, bool]:
    weight = min(max(ratio, 0.8), 1.28)
    return -weight * a * logp, -weight * a, weight != ratio


def sapo_by_hand(ratio: float, a: float, logp: float) -> tuple[float, float, bool]:
    tau = 1.0 if a > 0 else 1.05
    p = 1 / (1 + math.exp(-tau * (ratio - 1)))
    return -4 / tau * p * a, -4 * p * (1 - p) * ratio * a, False  # the paper's weight w = 4 p (1 - p), on ratio * A


@pytest.mark.parametrize("loss, by_hand", [
    (dual_clip, dual_by_hand),
    (policy_gradient, policy_gradient_by_hand),
    (cispo, cispo_by_hand),
    (sapo, sapo_by_hand),
])  # fmt: skip
def test_values_gradients_and_stats(loss, by_hand):
    logp, inputs = setting()
    per_token, stats = loss(logp, inputs, CFG)
    (gradient,) = torch.autograd.grad(per_token.sum(), logp)
    for i, (ratio, a) in enumerate(CASES):
        value, slope, clipped = by_hand(ratio, a, logp[i].item())
        assert per_token[i].item() == pytest.approx(value, rel=1e-12, abs=1e-14), CASES[i]
        assert gradient[i].item() == pytest.approx(slope, rel=1e-11, abs=1e-14), CASES[i]
        assert stats["clip_frac"][i].item() == float(clipped), CASES[i]
        assert stats["ratio"][i].item() == pytest.approx(ratio, rel=1e-12)
        assert stats["kl"][i].item() == pytest.approx(ratio - 1 - math.log(ratio), rel=1e-9, abs=1e-14)
    assert not any(value.requires_grad for value in stats.values())


def test_dual_clip_is_ppo_clip_where_advantages_are_positive_or_ratios_small():
    logp, inputs = setting()
    dual, single = dual_clip(logp, inputs, CFG)[0], ppo_clip(logp, inputs, CFG)[0]
    bounded = torch.tensor([a < 0 and ratio > 3 for ratio, a in CASES])
    assert torch.equal(dual[~bounded], single[~bounded]) and (dual[bounded] < single[bounded]).all() and bounded.sum() == 2


LENGTHS = [3, 1, 6, 2]


def sequences() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Sequence ratios within and out of [0.8, 1.28], with advantages of either sign; tokens of one sequence differ."""
    generator = torch.Generator().manual_seed(1)
    old = -3 * torch.rand(sum(LENGTHS), generator=generator, dtype=torch.float64)
    shift = torch.tensor([0.4, -0.4, 0.1, 0.5]).double().repeat_interleave(torch.tensor(LENGTHS))
    logp = old + shift + 0.2 * torch.randn(sum(LENGTHS), generator=generator, dtype=torch.float64)
    advantage = torch.tensor([1.0, -2.0, 0.5, -1.5]).double().repeat_interleave(torch.tensor(LENGTHS))
    return logp.requires_grad_(), old, advantage


def gspo_of_the_paper(logp: torch.Tensor, old: torch.Tensor, advantage: torch.Tensor) -> torch.Tensor:
    """Equation 5: the mean over sequences of min(s A, clip(s) A), s = (pi / pi_old) ** (1 / length), differentiated as it stands."""
    total, start = torch.zeros((), dtype=torch.float64), 0
    for length in LENGTHS:
        part = slice(start, start + length)
        s = (logp[part].sum() - old[part].sum()).exp() ** (1 / length)
        a = advantage[start]
        total = total - torch.minimum(s * a, s.clamp(0.8, 1.28) * a)
        start += length
    return total / len(LENGTHS)


def test_gspo_has_value_and_gradient_of_the_sequence_objective():
    logp, old, advantage = sequences()
    per_token, stats = gspo(logp, inputs_of(old, advantage, LENGTHS), CFG)
    loss = (token_weights(torch.tensor(LENGTHS), "sequence", sum(LENGTHS), len(LENGTHS)).double() * per_token).sum()
    expected = gspo_of_the_paper(logp, old, advantage)
    torch.testing.assert_close(loss, expected, rtol=1e-6, atol=0)  # the weights are fp32
    torch.testing.assert_close(torch.autograd.grad(loss, logp)[0], torch.autograd.grad(expected, logp)[0], rtol=1e-6, atol=1e-12)
    assert 0 < stats["clip_frac"].mean() < 1
    first = ((logp[:3] - old[:3]).sum() / 3).exp().item()
    assert stats["ratio"][:3].tolist() == pytest.approx([first] * 3, rel=1e-12)
    assert not any(value.requires_grad for value in stats.values())


def test_gspo_does_not_depend_on_what_else_lies_in_the_pack():
    logp, old, advantage = sequences()
    whole, _ = gspo(logp, inputs_of(old, advantage, LENGTHS), CFG)
    alone, _ = gspo(logp[4:10], inputs_of(old[4:10], advantage[4:10], [6]), CFG)
    torch.testing.assert_close(whole[4:10], alone, rtol=1e-14, atol=0)


def test_gspo_with_an_empty_response_and_the_papers_bounds():
    logp, old, advantage = sequences()
    cfg = AlgoConfig(loss="gspo", clip=ClipConfig(low=3e-4, high=4e-4))
    inputs = LossInputs(old, advantage, old, torch.arange(5).repeat_interleave(torch.tensor([3, 0, 1, 6, 2])), 5)
    per_token, stats = gspo(logp, inputs, cfg)
    assert per_token.isfinite().all() and stats["clip_frac"][:3].tolist() == [1.0] * 3  # A > 0, s about e^0.4
    assert per_token[:3].tolist() == pytest.approx([-1.0004] * 3)


@pytest.mark.parametrize("name", ["dual_clip", "policy_gradient", "gspo", "cispo", "sapo", "ppo_clip"])
def test_on_policy_every_gradient_is_that_of_reinforce(name):
    logp = torch.tensor([-1.0, -2.0, -0.5], dtype=torch.float64, requires_grad=True)
    advantage = torch.tensor([2.0, -3.0, 0.5], dtype=torch.float64)
    per_token, stats = LOSSES.get(name)(logp, inputs_of(logp.detach(), advantage), CFG)
    per_token.sum().backward()
    torch.testing.assert_close(logp.grad, -advantage, rtol=1e-14, atol=1e-15)
    assert stats["clip_frac"].sum() == 0 and stats["kl"].abs().max() == 0 and stats["ratio"].tolist() == [1.0] * 3


@pytest.mark.parametrize("name", ["dual_clip", "policy_gradient", "gspo", "cispo", "sapo"])
def test_no_tokens_and_ratios_beyond_fp32(name):
    loss = LOSSES.get(name)
    per_token, stats = loss(torch.zeros(0), inputs_of(torch.zeros(0), torch.zeros(0)), CFG)
    assert per_token.shape == (0,) and all(value.shape == (0,) for value in stats.values())
    logp = torch.tensor([-0.1, -0.1, -200.0, -200.0], requires_grad=True)
    old = torch.tensor([-200.0, -200.0, -0.1, -0.1])
    per_token, stats = loss(logp, inputs_of(old, torch.tensor([1.0, -1.0, 1.0, -1.0]), [1, 1, 1, 1]), CFG)
    per_token.sum().backward()
    assert per_token.isfinite().all() and logp.grad.isfinite().all() and all(value.isfinite().all() for value in stats.values())
    assert per_token.dtype == torch.float32


def test_dr_grpo_divides_each_sum_by_a_constant():
    """Dr. GRPO section 3.2: the sum over tokens of each sequence, divided by a constant length, the mean over sequences."""
    lengths = [2, 5, 1]
    logp = torch.linspace(-2, -0.5, 8, dtype=torch.float64, requires_grad=True)
    advantage = torch.tensor([1.0, -0.5, 3.0]).double().repeat_interleave(torch.tensor(lengths))
    cfg = AlgoConfig(aggregation="sequence_sum", length_constant=512)
    per_token, _ = objective(logp, None, inputs_of(logp.detach(), advantage, lengths), cfg)
    loss = (token_weights(torch.tensor(lengths), cfg.aggregation, 8, 3).double() * per_token).sum()
    assert loss.item() == pytest.approx(-(2 * 1.0 - 5 * 0.5 + 1 * 3.0) / 512 / 3, rel=1e-6)
    assert torch.autograd.grad(loss, logp)[0].tolist() == pytest.approx((-advantage / 512 / 3).tolist(), rel=1e-6)
