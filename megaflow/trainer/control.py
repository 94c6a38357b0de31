"""What a run itself changes of its settings as it goes: the KL coefficient and the learning rate."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Any

from megaflow.actor import optimizer as optim
from megaflow.actor.engine import TrainedEngine
from megaflow.algo.kl_control import controller
from megaflow.config.checks import samples_per_step
from megaflow.config.schema import Config
from megaflow.types import Stats


class Control:
    """The same on every rank: it only sees what all ranks know. Saved with each checkpoint.

    kl_coef   algo.kl.coef as it stands: what algo.kl.controller made of it, times what guards have raised it by
    lr_scale  what guards have multiplied the learning rate by
    """

    def __init__(self, cfg: Config):
        self.cfg = cfg
        self.kl = controller(cfg.algo.kl)
        self.kl_scale = 1.0
        self.lr_scale = 1.0

    @property
    def kl_coef(self) -> float:
        return self.kl.coef * self.kl_scale

    def settings(self) -> Config:
        """The configuration of the next step."""
        kl = dataclasses.replace(self.cfg.algo.kl, coef=self.kl_coef)
        return dataclasses.replace(self.cfg, algo=dataclasses.replace(self.cfg.algo, kl=kl))

    def observe(self, stats: Stats) -> Stats:
        """After a step: algo/kl_coef, as the step had it; then algo/ref_kl, if it was measured, decides the next one."""
        measured = {"algo/kl_coef": self.kl_coef} if self.cfg.algo.kl.where != "none" else {}
        if "algo/ref_kl" in stats:
            self.kl.update(stats["algo/ref_kl"], samples_per_step(self.cfg))
        return measured

    def lower_lr(self, factor: float, trained: Iterable[TrainedEngine]) -> None:
        self.lr_scale *= factor
        self.apply(trained)

    def raise_kl(self, factor: float) -> None:
        self.kl_scale /= factor

    def apply(self, trained: Iterable[TrainedEngine]) -> None:
        """The learning rates as they shall be, of the policy and of a critic; also after a checkpoint was loaded."""
        for engine in trained:
            optim.scale_learning_rate(engine.optimizer, engine.scheduler, engine.config, self.lr_scale)

    def state_dict(self) -> dict[str, Any]:
        return {"kl": self.kl.state_dict(), "kl_scale": self.kl_scale, "lr_scale": self.lr_scale}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.kl.load_state_dict(state["kl"])
        self.kl_scale, self.lr_scale = state["kl_scale"], state["lr_scale"]
