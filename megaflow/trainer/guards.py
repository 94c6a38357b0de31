"""Limits that each step is held to. Rank 0 judges, every rank does what was decided; what was done is bounded, counted and told.

    guard        what is looked at                                        past its limit when
    kl           train/ref_kl                                             above guard.kl
    step_kl      train/kl                                                 above guard.step_kl
    reward_drop  mean of reward/mean over guard.reward_window steps       that far below the best such mean
    nonfinite    losses, gradient norms, reward/mean, train/skipped       not finite, or an optimizer step was left out
    mismatch     mismatch/k3                                              above guard.mismatch
    entropy      train/entropy                                            below guard.entropy
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import Any

from megaflow.config.schema import GuardConfig
from megaflow.types import DivergedError, Stats

KEPT_EVENTS = 20  # in status.json
FINITE = ("train/loss", "train/grad_norm", "critic/loss", "critic/grad_norm", "reward/mean")


@dataclass(frozen=True)
class Alarm:
    """A guard past its limit. `action` is what is done, which is only `warn` within the cooldown of the same guard."""

    step: int
    guard: str
    value: float
    limit: float
    action: str
    is_news: bool = True  # False: only a warning, as in the step before

    def __str__(self) -> str:
        return f"guard.{self.guard}: step {self.step}: {_MEANING[self.guard].format(value=self.value, limit=self.limit)}: {self.action}"


_MEANING = {
    "kl": "train/ref_kl is {value:.4g}, above {limit:g}",
    "step_kl": "train/kl is {value:.4g}, above {limit:g}",
    "reward_drop": "the mean reward is {value:.4g} below its best, more than {limit:g}",
    "nonfinite": "a loss, a gradient or a reward is not finite ({value:g} found)",
    "mismatch": "mismatch/k3 is {value:.4g}, above {limit:g}",
    "entropy": "train/entropy is {value:.4g}, below {limit:g}",
}
_STRENGTH = ("warn", "raise_kl", "lower_lr", "rollback", "stop")


@dataclass(frozen=True)
class Verdict:
    """About one step: the alarms, strongest action last, and guard/* for the metrics."""

    alarms: tuple[Alarm, ...]
    stats: Stats

    def has(self, action: str) -> bool:
        return any(alarm.action == action for alarm in self.alarms)


class Guards:
    """`judge` runs on rank 0, which alone knows what was before; its state goes into checkpoints and is not rolled back."""

    def __init__(self, cfg: GuardConfig):
        self.cfg = cfg
        self.actions = self.rollbacks = 0
        self.acted_at: dict[str, int] = {}
        self.rewards: list[tuple[int, float]] = []  # (step, mean reward), the last reward_window of them
        self.best: float | None = None
        self.events: list[dict[str, Any]] = []
        self.went_back_to: int | None = None
        self.warned: list[str] = []  # guards past their limit in the step before

    @property
    def may_roll_back(self) -> bool:
        """Whether the configuration has a rollback, so that a checkpoint must exist from the start."""
        return "rollback" in (value for key, value in asdict(self.cfg).items() if key.endswith("_action"))

    def watched(self, update: Callable[..., Stats], *args: Any) -> Stats:
        """update(*args). If it diverges and guard.nonfinite_action is rollback, such stats as make that guard act."""
        try:
            return update(*args)
        except DivergedError:
            if self.cfg.nonfinite_action != "rollback":
                raise
            return {"train/loss": math.nan, "guard/diverged": 1.0}

    def judge(self, step: int, stats: Stats) -> Verdict:
        """On rank 0, once a step. Raises DivergedError for `stop`, and when guard.max_actions have been taken already."""
        self._remember(step, stats)
        alarms = sorted(self._alarms(step, stats), key=lambda alarm: _STRENGTH.index(alarm.action))
        self.warned = [alarm.guard for alarm in alarms]
        for alarm in alarms:
            self._take(alarm)
        counts = {"guard/fired": len(alarms), "guard/actions": self.actions, "guard/rollbacks": self.rollbacks}
        return Verdict(tuple(alarms), {name: float(value) for name, value in counts.items()})

    def _remember(self, step: int, stats: Stats) -> None:
        reward = stats.get("reward/mean", math.nan)
        if math.isfinite(reward):
            self.rewards = [*self.rewards, (step, reward)][-self.cfg.reward_window :]
        if len(self.rewards) == self.cfg.reward_window:
            self.best = max(self._mean_reward(), -math.inf if self.best is None else self.best)

    def _mean_reward(self) -> float:
        return sum(reward for _, reward in self.rewards) / len(self.rewards)

    def _alarms(self, step: int, stats: Stats) -> Iterator[Alarm]:
        for guard, value, limit in self._past_limits(stats):
            action = getattr(self.cfg, f"{guard}_action")
            is_cooling = guard in self.acted_at and step - self.acted_at[guard] <= self.cfg.cooldown
            is_urgent = action in ("stop", "rollback") and guard == "nonfinite"  # weights that are nan do not get better by waiting
            action = "warn" if is_cooling and not is_urgent else action
            yield Alarm(step, guard, value, limit, action, action != "warn" or guard not in self.warned)

    def _past_limits(self, stats: Stats) -> Iterator[tuple[str, float, float]]:
        """(guard, what was found, its limit)."""
        cfg = self.cfg
        upper = (("kl", "train/ref_kl", cfg.kl), ("step_kl", "train/kl", cfg.step_kl), ("mismatch", "mismatch/k3", cfg.mismatch))
        for guard, metric, limit in upper:
            if limit and stats.get(metric, 0.0) > limit:
                yield guard, stats[metric], limit
        if cfg.entropy and stats.get("train/entropy", math.inf) < cfg.entropy:
            yield "entropy", stats["train/entropy"], cfg.entropy
        is_full = len(self.rewards) == cfg.reward_window
        if cfg.reward_drop and is_full and self.best is not None and self.best - self._mean_reward() > cfg.reward_drop:
            yield "reward_drop", self.best - self._mean_reward(), cfg.reward_drop
        bad = sum(not math.isfinite(stats.get(name, 0.0)) for name in FINITE)
        bad += sum(int(stats.get(name, 0.0)) for name in ("train/skipped", "critic/skipped", "guard/diverged"))
        if bad:
            yield "nonfinite", float(bad), 0.0

    def _take(self, alarm: Alarm) -> None:
        if alarm.is_news:
            event = {"step": alarm.step, "guard": alarm.guard, "action": alarm.action, "text": str(alarm)}
            self.events = [*self.events, event][-KEPT_EVENTS:]
        if alarm.action == "warn":
            return
        if alarm.action == "stop":
            raise DivergedError(f"{alarm}; the last checkpoint is untouched. To go on all the same: guard.{alarm.guard}_action=warn")
        if self.actions >= self.cfg.max_actions:
            raise DivergedError(
                f"{alarm}, but guard.max_actions={self.cfg.max_actions} have been taken already; the last checkpoint is untouched. "
                "Lower actor.lr, look at the quarantined batches, or resume from an earlier checkpoint (run.resume=PATH)"
            )
        self.actions += 1
        self.rollbacks += alarm.action == "rollback"
        self.acted_at[alarm.guard] = alarm.step

    def rolled_back(self, step: int) -> None:
        """The run goes on after `step`: rewards of later steps are forgotten, cooldowns begin there, the best stays."""
        self.rewards = [(at, reward) for at, reward in self.rewards if at <= step]
        self.acted_at = {guard: min(at, step) for guard, at in self.acted_at.items()}
        self.went_back_to = step

    def state_dict(self) -> dict[str, Any]:
        names = ("actions", "rollbacks", "acted_at", "rewards", "best", "events", "went_back_to", "warned")
        return {name: getattr(self, name) for name in names}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for name, value in state.items():
            setattr(self, name, value)
        self.rewards = [(int(step), reward) for step, reward in self.rewards][-self.cfg.reward_window :]
