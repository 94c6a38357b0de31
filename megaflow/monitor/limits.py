"""How long a rank may go without a sign of progress."""

from __future__ import annotations

import math

from megaflow.config.schema import Config, RewardModelConfig
from megaflow.monitor.progress import Doing

MARGIN_S = 30.0  # whoever has a limit of its own speaks first: it knows more
WORKER_START_S = 120.0  # of a reward worker (rewards/processes.py)
MAX_WAIT_S = 30.0  # between two tries of a reward service (rewards/remote.py)
BEFORE_COLLECTIVES = 0.9  # part of run.timeout_s: then the collective itself would fail on all ranks at once, and say less


def _of_service(model: RewardModelConfig) -> float:
    """Until a reward service counts as lost: all tries of a request, and the waits between them."""
    return (model.retries + 1) * (model.timeout_s + MAX_WAIT_S) if model.where == "remote" and model.url else 0.0


class Limits:
    """Of one run. 0 in the configuration: no limit.

    collective_s  no rank waits longer in a collective, whatever its phase's limit is
    """

    def __init__(self, cfg: Config):
        self.settings = cfg.watchdog
        self.collective_s = BEFORE_COLLECTIVES * cfg.run.timeout_s
        engine = cfg.rollout.timeout_s + cfg.rollout.start_timeout_s if cfg.rollout.backend == "sglang" else 0.0
        rewards = WORKER_START_S + cfg.reward.timeout_s + _of_service(cfg.reward.model)
        self._own = {"start": engine, "sync": engine, "rollout": engine, "eval": max(engine, rewards), "reward": rewards}

    def of_phase(self, phase: str, is_first: bool) -> float:
        """Seconds. A phase's first time in a process may take `first_factor` times as long: kernels are compiled, engines start."""
        factor = self.settings.first_factor if is_first else 1.0
        if phase in self.settings.phases:
            wanted = self.settings.phases[phase] * factor
        else:
            own = self._own.get(phase, -MARGIN_S) + MARGIN_S
            wanted = max(self.settings.timeout_s * factor, own) if self.settings.timeout_s else 0.0
        return wanted or math.inf

    def of(self, doing: Doing) -> float:
        return self.of_phase(doing.phase, doing.is_first)

    @property
    def longest_s(self) -> float:
        limits = [self.of_phase(phase, is_first=True) for phase in {*self.settings.phases, *self._own, ""}]
        return max([limit for limit in limits if limit < math.inf], default=self.collective_s)

    @property
    def period_s(self) -> float:
        """Between two looks."""
        shortest = min(self.of_phase(phase, is_first=False) for phase in {*self.settings.phases, *self._own, ""})
        return min(max(shortest / 10, 0.1), 1.0)

    @property
    def tell_s(self) -> float:
        """Between two words to ranks on other hosts."""
        return min(max(self.period_s, self.longest_s / 60), 15.0)

    @property
    def backstop_s(self) -> float:
        """Longer than any stall needs to be found and reported in an orderly way."""
        return 1.25 * self.longest_s + 20.0
