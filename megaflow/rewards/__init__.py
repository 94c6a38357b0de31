"""Rewards: plain Python functions of one response, computed in worker processes that may be killed.

A reward function is `fn(response: str, answer, prompt: Prompt, **options) -> float`; docs/rewards.md shows how to write one. Listing the
names imports none of them. A function may carry an attribute `find_answer(response, answer, prompt) -> str | None`: what the response
answers, spelt the same for equal answers; majority voting needs it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from megaflow.registry import Registry

if TYPE_CHECKING:
    from megaflow.rewards.pool import RewardPool, Scored

REWARDS = Registry("reward")
REWARDS.register("exact", "megaflow.rewards.text:exact")
REWARDS.register("format", "megaflow.rewards.text:format_matches")
REWARDS.register("number", "megaflow.rewards.number:last_number")
REWARDS.register("boxed", "megaflow.rewards.boxed:boxed")
REWARDS.register("math", "megaflow.rewards.mathverify:equivalent")
REWARDS.register("reasoning_gym", "megaflow.rewards.gym:task_score")

__all__ = ["REWARDS", "RewardPool", "Scored"]


def __getattr__(name: str) -> Any:
    if name not in ("RewardPool", "Scored"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from megaflow.rewards import pool

    return getattr(pool, name)
