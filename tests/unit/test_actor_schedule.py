"""The learning-rate schedule against values computed by hand."""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest

from megaflow.config.schema import ActorConfig


def rates(config: ActorConfig, total: int) -> list[float]:
    from megaflow.actor.optimizer import make_scheduler

    optimizer = SimpleNamespace(param_groups=[{"lr": config.lr, "params": []}])
    scheduler = make_scheduler(optimizer, config, total)
    found = []
    for _ in range(total):
        found.append(optimizer.param_groups[0]["lr"])
        scheduler.step(increment=1)
    return found


def test_constant_without_warm_up():
    assert rates(ActorConfig(lr=1e-3), 5) == pytest.approx([1e-3] * 5)


def test_warm_up_then_linear_to_the_last_step():
    found = rates(ActorConfig(lr=1e-3, lr_warmup_steps=4, lr_decay="linear", min_lr=1e-4), 10)
    warm = [1e-3 * k / 4 for k in range(4)]
    down = [1e-4 + (1e-3 - 1e-4) * (1 - k / 6) for k in range(6)]
    assert found == pytest.approx(warm + down)


def test_cosine():
    found = rates(ActorConfig(lr=2e-3, lr_decay="cosine"), 8)
    assert found == pytest.approx([1e-3 * (1 + math.cos(math.pi * k / 8)) for k in range(8)])


def test_non_finite_gradients_leave_everything_as_it_was():
    import torch

    from megaflow.actor.optimizer import guarded_step

    class Optimizer:
        stepped = 0

        def prepare_grads(self):
            return False

        def get_grad_norm(self):
            return torch.tensor(self.norm)

        def step(self):
            self.stepped += 1

    optimizer = Optimizer()
    for norm, stepped in ((float("nan"), 0), (float("inf"), 0), (2.5, 1)):
        optimizer.norm = norm
        ok, found = guarded_step(optimizer)
        assert ok == (stepped == 1) and optimizer.stepped == stepped
        assert found == norm or math.isnan(norm)
