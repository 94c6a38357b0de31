"""What a plan is made for beside the device: the models of a run, its kinds of steps, and how long its sequences are."""

from __future__ import annotations

import math
from dataclasses import dataclass

from megaflow.config.checks import generates
from megaflow.config.schema import Config
from megaflow.plan.activations import Pack
from megaflow.registry import Registry
from megaflow.shape import ModelShape, read_shape


@dataclass(frozen=True)
class Step:
    """What a kind of step works on. name: online, or offline.objective. samples: sequences of a step on all ranks."""

    name: str
    samples: float

    @property
    def is_online(self) -> bool:
        return self.name == "online"


def steps_of(config: Config) -> list[Step]:
    """The kinds of steps that a run makes, in their order."""
    rollout, offline, found = config.rollout, config.offline, []
    if offline.steps:
        each = {"rl": rollout.samples_per_prompt, "sft": 1, "dpo": 2}[offline.objective]
        found.append(Step(offline.objective, (offline.batch or rollout.prompts_per_step) * each))
    if offline.steps < config.run.steps or not found:
        found.append(Step("online", rollout.prompts_per_step * rollout.samples_per_prompt))
    return found


def kl_reads_reference(config: Config) -> bool:
    return config.algo.kl.where != "none" and config.algo.kl.coef > 0


@dataclass(frozen=True)
class Models:
    """What is on the device beside the policy. critic, reward_model (on the mesh): their shapes; None: there is none.

    reward_fraction  part of the device that an engine of the reward model takes while it scores; 0: there is none
    """

    policy: ModelShape
    critic: ModelShape | None = None
    reward_model: ModelShape | None = None
    reference: bool = False
    reward_fraction: float = 0.0

    @classmethod
    def of(cls, config: Config, advantages: Registry | None = None) -> Models:
        """From the folders' config.json; weights need not be there. Raises PreflightError.

        advantages: asked about an estimator of the user's own, which may read a critic's values.
        """
        name, reward = config.algo.advantage, config.reward.model
        has_critic = name == "gae" or (advantages is not None and ":" in name and getattr(advantages.get(name), "needs_values", False))
        is_dpo = config.offline.steps > 0 and config.offline.objective == "dpo"
        scores = reward.path if generates(config) else ""
        return cls(
            policy=read_shape(config.model.path),
            critic=read_shape(config.critic.path or config.model.path) if has_critic else None,
            reward_model=read_shape(scores) if scores and reward.where == "mesh" else None,
            reference=is_dpo or kl_reads_reference(config),
            reward_fraction=reward.mem_fraction if scores and reward.where == "engine" else 0.0,
        )


@dataclass(frozen=True)
class Lengths:
    """Tokens of a sequence. is_mean: measured ones; else the longest possible, and packs are taken to be full."""

    prompt: float
    response: float
    is_mean: bool = False

    @classmethod
    def longest(cls, config: Config) -> Lengths:
        return cls(config.data.max_prompt_tokens, config.sampling.max_new_tokens)

    @property
    def total(self) -> float:
        return self.prompt + self.response

    def pack(self, budget: int, samples: float, spread: float = 0.0) -> tuple[Pack, int]:
        """(the largest pack of `samples` sequences of a rank under a budget of tokens, number of packs). Packs of one lot are of like size,
        so just above the budget there are two half full ones; `spread`: part by which a lot's total may differ from the mean."""
        tokens = samples * self.total
        number = max(1, math.ceil(tokens / budget))
        size = min(tokens, max(budget, self.total))
        if self.is_mean:
            lots = (tokens * (1 - spread), tokens, tokens * (1 + spread))
            size = max(each / max(1, math.ceil(each / budget)) for each in lots)
        return Pack(round(size), round(size * self.response / self.total)), number
