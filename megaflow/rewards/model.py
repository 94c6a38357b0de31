"""What a reward model's scores become within a sample's reward: normalised, clipped, weighted."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from megaflow.config.schema import RewardModelConfig
from megaflow.rewards.remote import RemoteScorer
from megaflow.types import Sample

PART = "model"  # its name among reward_parts: the score as the model gave it
STD_EPS = 1e-8
# What sglang 0.5.15 scores as transformers does; for other names it has no class, or one whose head is another.
ENGINE_ARCHITECTURES = ("LlamaForSequenceClassification", "Qwen2ForSequenceClassification", "Qwen3ForSequenceClassification")


@dataclass
class RunningMoments:
    """Mean and variance of all numbers seen, batch after batch, exact to rounding: Chan, Golub and LeVeque 1979, equation 2.1."""

    count: int = 0
    mean: float = 0.0
    squares: float = 0.0  # sum of squared distances to the mean

    def add(self, values: Sequence[float]) -> None:
        number = len(values)
        if not number:
            return
        mean = math.fsum(values) / number
        squares = math.fsum((v - mean) ** 2 for v in values)
        total, apart = self.count + number, mean - self.mean
        self.squares += squares + apart**2 * self.count * number / total
        self.mean += apart * number / total
        self.count = total

    @property
    def std(self) -> float:
        """Divides by the count; 1 before two numbers were seen."""
        return math.sqrt(self.squares / self.count) if self.count > 1 else 1.0


class ModelReward:
    """On rank 0. Scores come from the service at `url`, or the model beside the actor has put them into `sums["reward_model"]` of each."""

    def __init__(self, config: RewardModelConfig):
        self.config = config
        self.moments = RunningMoments()
        self._remote = RemoteScorer(config) if config.where == "remote" else None

    def scores(self, samples: Sequence[Sample]) -> list[float]:
        """As the model gives them."""
        if self._remote is not None:
            return self._remote.scores(samples)
        return [s.sums["reward_model"] for s in samples]

    def shares(self, scores: Sequence[float], learn: bool) -> list[float]:
        """What each score adds to the reward: weight * clip((score - mean) / std), mean and std over all scores of the run so far.

        learn: these scores count among them, from now on; those of evaluations do not.
        """
        if self.config.normalize and learn:
            self.moments.add(scores)
        return [self.config.weight * self._clipped(self._normalised(score)) for score in scores]

    def _normalised(self, score: float) -> float:
        return (score - self.moments.mean) / (self.moments.std + STD_EPS) if self.config.normalize else score

    def _clipped(self, score: float) -> float:
        limit = self.config.clip
        return min(max(score, -limit), limit) if limit else score

    def state_dict(self) -> dict[str, Any]:
        return dict(vars(self.moments))

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.moments = RunningMoments(**state)


def is_configured(config: RewardModelConfig) -> bool:
    return bool(config.url if config.where == "remote" else config.path)
