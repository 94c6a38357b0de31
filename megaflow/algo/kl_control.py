"""How strongly the distance to the reference is weighed as training goes on. Plain numbers, the same on every rank."""

from __future__ import annotations

import math
from dataclasses import dataclass

from megaflow.config.schema import KLConfig

ERROR_LIMIT = 0.2  # of the proportional error: one step far off must not throw the coefficient


def controller(cfg: KLConfig) -> FixedKL | AdaptiveKL:
    """The one that cfg.controller names."""
    return AdaptiveKL(cfg.coef, cfg.target, cfg.horizon) if cfg.controller == "adaptive" else FixedKL(cfg.coef)


@dataclass
class FixedKL:
    """The coefficient stays as it is: the present configuration's, also in a resumed run."""

    coef: float

    def update(self, kl: float, samples: int) -> float:
        return self.coef

    def state_dict(self) -> dict[str, float]:
        return {}

    def load_state_dict(self, state: dict[str, float]) -> None:
        pass


@dataclass
class AdaptiveKL:
    """Raises the coefficient while the KL is above `target` and lowers it while it is below.

    Ziegler et al. (arXiv:1909.08593) section 2.2: coef *= 1 + clip(kl / target - 1, -0.2, 0.2) * samples / horizon, in the form of
    their code, where the gain grows with the samples of the step. target in nats, of what `kl` is: here the mean over tokens, as in verl.
    """

    coef: float
    target: float
    horizon: int  # samples over which the coefficient can change by about ERROR_LIMIT

    def __post_init__(self) -> None:
        assert self.coef > 0 and self.target > 0 and self.horizon > 0, (self.coef, self.target, self.horizon)

    def update(self, kl: float, samples: int) -> float:
        """After a step of so many samples whose mean KL was `kl`; returns the new coefficient."""
        if not math.isfinite(kl):
            return self.coef  # one step that went wrong must not turn the coefficient into nan for good
        error = min(max(kl / self.target - 1.0, -ERROR_LIMIT), ERROR_LIMIT)
        self.coef *= 1.0 + error * samples / self.horizon
        return self.coef

    def state_dict(self) -> dict[str, float]:
        return {"coef": self.coef}

    def load_state_dict(self, state: dict[str, float]) -> None:
        self.coef = state.get("coef", self.coef)  # none was kept while the coefficient was fixed
