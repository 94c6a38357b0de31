"""Preference losses and their derivative against values by hand and autograd of the published formulas."""

from __future__ import annotations

import math

import pytest
import torch

from megaflow.algo.preference import preference_loss
from megaflow.config.schema import OfflineConfig

MARGINS = torch.tensor([-7.0, -0.3, 0.0, 0.4, 12.0], dtype=torch.float64)


def published(margin: torch.Tensor, cfg: OfflineConfig) -> torch.Tensor:
    """As the papers write them, without any care for overflow."""
    if cfg.dpo_loss == "ipo":
        return (margin - 1 / (2 * cfg.beta)) ** 2
    right, wrong = 1 / (1 + torch.exp(-cfg.beta * margin)), 1 / (1 + torch.exp(cfg.beta * margin))
    return -(1 - cfg.label_smoothing) * torch.log(right) - cfg.label_smoothing * torch.log(wrong)


LOSSES = [OfflineConfig(beta=0.1), OfflineConfig(beta=0.5, label_smoothing=0.2), OfflineConfig(dpo_loss="ipo", beta=0.25)]


@pytest.mark.parametrize("cfg", LOSSES)
def test_loss_and_derivative_are_those_of_the_formula(cfg: OfflineConfig) -> None:
    margin = MARGINS.clone().requires_grad_()
    expected = published(margin, cfg)
    (slope,) = torch.autograd.grad(expected.sum(), margin)
    loss, derivative = preference_loss(MARGINS, cfg)
    torch.testing.assert_close(loss, expected.detach(), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(derivative, slope, rtol=1e-12, atol=1e-12)


def test_by_hand() -> None:
    loss, derivative = preference_loss(torch.zeros(1), OfflineConfig(beta=0.1))
    assert (float(loss), float(derivative)) == pytest.approx((math.log(2), -0.05))
    loss, derivative = preference_loss(torch.tensor([3.0]), OfflineConfig(beta=0.25, dpo_loss="ipo"))
    assert (float(loss), float(derivative)) == (1.0, 2.0)  # two from 1 / (2 * 0.25) = 2


def test_a_pair_that_is_far_off_gives_no_overflow() -> None:
    loss, derivative = preference_loss(torch.tensor([-1e5, 1e5]), OfflineConfig(beta=1.0))
    assert loss.tolist() == [1e5, 0.0] and derivative.tolist() == [-1.0, 0.0]
