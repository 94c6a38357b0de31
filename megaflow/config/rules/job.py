"""What rules look at, and the questions about a configuration that several of them ask."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from megaflow.config.schema import Config


@dataclass(frozen=True)
class Job:
    """What the rules look at: the configuration and how many ranks there are, in all and on each host."""

    config: Config
    world_size: int
    ranks_per_host: int


Found = Iterator[tuple[tuple[str, ...], str]]


def samples_per_step(config: Config) -> int:
    """N, sequences generated in a step."""
    return config.rollout.prompts_per_step * config.rollout.samples_per_prompt


def generates(config: Config) -> bool:
    """Whether a training run needs an engine: not when all its steps learn from stored data and nothing is evaluated."""
    return config.offline.steps < config.run.steps or has_eval_sets(config)


def gives_rewards(config: Config) -> bool:
    """Whether there is a reward function or a reward model."""
    model = config.reward.model
    return bool(config.reward.functions) or bool(model.url if model.where == "remote" else model.path)


def has_eval_sets(config: Config) -> bool:
    return bool(config.data.eval) or config.data.eval_fraction > 0


def divisors(number: int) -> str:
    found = [str(size) for size in range(1, number + 1) if number % size == 0]
    return found[0] if len(found) == 1 else ", ".join(found[:-1]) + " or " + found[-1]
