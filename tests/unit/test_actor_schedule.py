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


@pytest.fixture
def one_rank():
    import torch.distributed as dist

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield dist.group.WORLD
    dist.destroy_process_group()


def optimizer_with(gradients: list[list[float]], limit: float, group):
    """As Megatron's: parameters with gradients, a norm's group, and a step that counts."""
    import torch

    parameters = [torch.nn.Parameter(torch.zeros(len(g))) for g in gradients]
    for p, g in zip(parameters, gradients, strict=True):
        p.grad = torch.tensor(g)
    steps = []
    return SimpleNamespace(
        config=SimpleNamespace(clip_grad=limit),
        optimizer=None,
        prepare_grads=lambda: False,
        get_parameters=lambda: parameters,
        get_grads_for_grad_norm=lambda: [p.grad for p in parameters],
        get_grad_stats_parallel_group=lambda: group,
        step_with_ready_grads=lambda: steps.append(1),
        steps=steps,
    )


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_non_finite_gradients_leave_everything_as_it_was(bad, one_rank):
    from megaflow.actor.optimizer import guarded_step

    optimizer = optimizer_with([[1.0, 2.0], [bad]], 1.0, one_rank)
    ok, norm = guarded_step(optimizer)
    assert not ok and not math.isfinite(norm) and not optimizer.steps
    assert optimizer.get_parameters()[0].grad.tolist() == [1.0, 2.0]


@pytest.mark.parametrize(("limit", "scale"), [(0.0, 1.0), (6.0, 1.0), (1.25, 0.25)])
def test_gradients_are_clipped_to_the_global_norm(limit, scale, one_rank):
    from megaflow.actor.optimizer import guarded_step

    optimizer = optimizer_with([[3.0, 0.0], [-4.0]], limit, one_rank)  # norm 5
    ok, norm = guarded_step(optimizer)
    assert ok and norm == pytest.approx(5.0) and len(optimizer.steps) == 1
    assert [g for p in optimizer.get_parameters() for g in p.grad.tolist()] == pytest.approx([3.0 * scale, 0.0, -4.0 * scale], rel=1e-6)
