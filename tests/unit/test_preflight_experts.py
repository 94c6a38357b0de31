"""What a mixture of experts asks of the layout, before anything is allocated."""

from __future__ import annotations

import pytest

from megaflow.config.loading import load
from megaflow.plan.preflight import Inspection, actor_divides, engine_divides, experts_divide, router_replay_fits
from megaflow.shape import shape_of
from tests.unit.test_weights_families import MOONLIGHT_16B_A3B, QWEN3_30B_A3B

DENSE = {**{k: v for k, v in QWEN3_30B_A3B.items() if "expert" not in k}, "model_type": "qwen3"}


def complaints(raw: dict, *overrides: str, world_size: int = 8) -> list[str]:
    found = Inspection(load(None, ["model.path=models/big", *overrides]), world_size)
    found.shape = shape_of(raw, "config.json")
    for check in (actor_divides, experts_divide, router_replay_fits, engine_divides):
        list(check(found))
    return [str(error) for error in found.errors]


@pytest.mark.parametrize(
    ("raw", "overrides", "message"),
    [
        (QWEN3_30B_A3B, ["parallel.ep=3"], "parallel.ep=3 does not divide the 128 experts of big; use 1, 2, 4, 8, 16, 32, 64 or 128"),
        (QWEN3_30B_A3B, ["parallel.etp=5"], "parallel.etp=5 does not divide the expert's size 768"),
        (QWEN3_30B_A3B, ["parallel.tp=2"], "parallel.tp=2 with the experts of big needs parallel.sp=true"),
        (QWEN3_30B_A3B, ["parallel.pp=4", "parallel.vpp=5"], "parallel.vpp=5 does not divide the 12 layers of a stage; use 1, 2, 3, 4, 6"),
        (DENSE, ["parallel.ep=2"], "parallel.ep=2 divides experts, and big has none; use 1"),
        (DENSE, ["rollout.tp=2", "rollout.ep=2"], "rollout.ep=2 divides experts, and big has none; use 1"),
        (DENSE, ["actor.router_replay=R3"], "actor.router_replay=R3 is about the routes of tokens to experts, and big has none; use none"),
        ({**QWEN3_30B_A3B, "mlp_only_layers": [0, 5]}, [], "every layer of qwen3_moe experts, and 2 of the 48 layers of big have none"),
        (QWEN3_30B_A3B, ["actor.router_replay=R3", "rollout.backend=json:loads"], "needs returns_routes=True of a rollout backend"),
    ],
)
def test_what_does_not_fit_is_named_with_the_numbers(raw, overrides, message):
    (line,) = complaints(raw, *overrides)
    assert message in line


def test_routes_of_a_token_by_hand():
    """48 layers of 8 experts out of 128, a byte each."""
    found = Inspection(load(None, ["model.path=models/big", "actor.router_replay=measure"]), 8, shape_of(QWEN3_30B_A3B, "config.json"))
    assert list(router_replay_fits(found)) == ["router replay: measure, 384 bytes of routes a token"]


def test_what_fits():
    fitting = ["parallel.tp=4", "parallel.sp=true", "parallel.ep=8", "parallel.pp=2", "parallel.vpp=3", "rollout.tp=4", "rollout.ep=4"]
    assert complaints(QWEN3_30B_A3B, *fitting, world_size=16) == []
    assert complaints(MOONLIGHT_16B_A3B, "parallel.ep=8", "rollout.tp=4", "rollout.ep=4") == []
