"""Rewards of samples: the weighted sum of functions that run in worker processes; failures are counted and reported."""

from __future__ import annotations

import dataclasses
import logging
from collections import Counter
from dataclasses import dataclass, field

from megaflow.config.schema import RewardConfig, RewardFunctionConfig
from megaflow.rewards import REWARDS
from megaflow.rewards.model import PART, ModelReward, is_configured
from megaflow.rewards.processes import Workers
from megaflow.rewards.worker import Failure, Outcome
from megaflow.types import ConfigError, Sample, UserError

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Scored:
    """The reward of one sample."""

    reward: float
    parts: dict[str, float] = field(default_factory=dict)  # by function, unweighted; none when it failed
    failure: Failure = ""
    detail: str = ""  # of the failure, for a person
    answer: str | None = field(default=None, repr=False)  # that the response gives, if it was asked for


class RewardPool:
    """Worker processes that compute rewards; on rank 0 only.

    counts         of the last call: failed (all of them), and thereof error, timeout, died
    tells_answers  the first function can say what a response answers, for majority voting
    Making one starts the workers and loads the functions: ConfigError for an unknown name, a module that does not import, options that the
    function does not take.
    """

    def __init__(self, config: RewardConfig):
        self.model = ModelReward(config.model) if is_configured(config.model) else None
        if not config.functions and self.model is None:
            raise ConfigError("reward.functions is empty; name at least one, e.g. reward.functions=[{name: number}], or a reward.model")
        for function in config.functions:
            REWARDS.validate(function.name)
        self.config = config
        self.counts: dict[str, int] = _count([])
        self._weights = dict(zip(part_names(config.functions), (function.weight for function in config.functions), strict=True))
        spec = [(part, function.name, dict(function.options)) for part, function in zip(self._weights, config.functions, strict=True)]
        self._workers = Workers(spec, config.workers, config.timeout_s)  # they answer at once if there is no function
        self.tells_answers = self._workers.tells_answers

    def score(self, samples: list[Sample], with_answers: bool = False, learn: bool = False, may_all_fail: bool = False) -> list[Scored]:
        """Rewards in the order of `samples`, also written to their `reward` and `reward_parts`.

        learn: the reward model's scores count for reward.model.normalize (those of training do, of evaluations not).
        Raises UserError when all of them fail, unless they may: a few samples prove nothing against the function.
        """
        outcomes = self._workers.run([(sample.text, sample.prompt, with_answers) for sample in samples])
        scored = [self._scored(outcome, sample) for outcome, sample in zip(outcomes, samples, strict=True)]
        if self.model is not None:
            scored = with_model(scored, self.model, samples, learn)
        for sample, result in zip(samples, scored, strict=True):
            sample.reward, sample.reward_parts = result.reward, dict(result.parts)
        self.counts = _count(scored)
        self._report([result for result in scored if result.failure], len(scored), may_all_fail)
        return scored

    def close(self) -> None:
        """Ends the workers, also those within an endless loop."""
        self._workers.close()

    def __enter__(self) -> RewardPool:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _scored(self, outcome: Outcome, sample: Sample) -> Scored:
        if outcome.failure:
            detail = f"sample {sample.index} of prompt {sample.prompt.id}: {outcome.detail}"
            return Scored(self.config.failed, {}, outcome.failure, detail)
        reward = sum(self._weights[part] * value for part, value in outcome.parts.items())
        return Scored(reward, outcome.parts, answer=outcome.answer)

    def _report(self, failures: list[Scored], number: int, may_all_fail: bool) -> None:
        if not failures:
            return
        first = failures[0].detail
        kinds = ", ".join(f"{count} {kind}" for kind, count in Counter(result.failure for result in failures).items())
        if len(failures) == number and not may_all_fail:
            raise UserError(f"all {number} rewards failed ({kinds}); the first: {first}")
        log.warning("%d of %d rewards failed (%s) and count as %g; the first: %s", len(failures), number, kinds, self.config.failed, first)


def with_model(scored: list[Scored], model: ModelReward, samples: list[Sample], learn: bool) -> list[Scored]:
    """The model's share added to the functions'. A sample whose function failed keeps the reward that failures get."""
    scores = model.scores(samples)
    return [
        each if each.failure else dataclasses.replace(each, reward=each.reward + share, parts={**each.parts, PART: score})
        for each, score, share in zip(scored, scores, model.shares(scores, learn), strict=True)
    ]


def part_names(functions: list[RewardFunctionConfig]) -> list[str]:
    """Names of the parts: "format" of format, "score" of my/rewards.py:score; a second one of the same name is "score_2"."""
    names = [PART]  # the reward model's
    for function in functions:
        name = function.name.rpartition(":")[2]
        while name in names:
            stem, _, number = name.rpartition("_")
            name = f"{stem}_{int(number) + 1}" if stem and number.isdigit() else f"{name}_2"
        names.append(name)
    return names[1:]


def _count(scored: list[Scored]) -> dict[str, int]:
    kinds = Counter(result.failure for result in scored if result.failure)
    return {"failed": kinds.total(), "error": kinds["error"], "timeout": kinds["timeout"], "died": kinds["died"]}
