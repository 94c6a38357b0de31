"""Adapters to experiment trackers: `Tracker(config, run_dir, resume_step)`, `.log(step, metrics)`, `.close()`. On rank 0 only.

metrics.jsonl is the record; a tracker is a view of it. Each package is imported when its tracker is chosen, and is optional.
A resumed run goes on in the same tracker run: its id is kept in <run>/logs/.
"""

from __future__ import annotations

import dataclasses
import importlib
import math
import os
import uuid
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

from megaflow.config.schema import Config
from megaflow.types import ConfigError


def require(package: str, module: str | None = None) -> ModuleType:
    """The tracker's package, imported. Raises ConfigError that says how to install it."""
    try:
        return importlib.import_module(module or package)
    except ImportError as error:
        raise ConfigError(
            f"monitor.trackers: {package} cannot be imported ({error}); pip install {package}, or take it out of monitor.trackers"
        ) from error


def finite(metrics: Mapping[str, float]) -> dict[str, float]:
    """Trackers' charts break on nan and infinity; metrics.jsonl keeps the record of them."""
    return {name: float(value) for name, value in metrics.items() if math.isfinite(value)}


def run_id(run_dir: Path, tracker: str, is_new: bool) -> str:
    """The tracker's own id of this run: made once, found again after a resume."""
    path = run_dir / "logs" / f"{tracker}_id"
    if is_new or not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(uuid.uuid4().hex[:12])
    return path.read_text()


class TensorBoard:
    """Event files in <run>/tensorboard: `tensorboard --logdir runs`."""

    def __init__(self, config: Config, run_dir: Path, resume_step: int = 0):
        require("tensorboard")
        from torch.utils.tensorboard import SummaryWriter

        # points of the killed run after its last checkpoint would otherwise be drawn twice
        purge = resume_step + 1 if resume_step else None
        self._writer = SummaryWriter(str(run_dir / "tensorboard"), purge_step=purge)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        for name, value in finite(metrics).items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


class WandB:
    """Weights & Biases. Offline (files in <run>/wandb, to be sent with `wandb sync`) unless a key is there or WANDB_MODE says otherwise."""

    def __init__(self, config: Config, run_dir: Path, resume_step: int = 0):
        wandb = require("wandb")
        mode = os.environ.get("WANDB_MODE") or ("online" if _has_wandb_key() else "offline")
        self._run = wandb.init(
            project=config.monitor.project,
            name=config.run.name,
            id=run_id(run_dir, "wandb", is_new=not resume_step),
            resume="allow" if mode == "online" else None,
            dir=str(run_dir),
            config=dataclasses.asdict(config),
            mode=mode,
        )

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._run.log(finite(metrics), step=step)

    def close(self) -> None:
        self._run.finish()


def _has_wandb_key() -> bool:
    """A key in the environment, or one that `wandb login` left in ~/.netrc. wandb asks at the terminal otherwise, and a job would hang."""
    if os.environ.get("WANDB_API_KEY"):
        return True
    netrc = Path.home() / ".netrc"
    return netrc.exists() and "wandb" in netrc.read_text()


class Trackio:
    """Hugging Face trackio: a database in the user's cache, or in TRACKIO_DIR; shown with `trackio show`.

    It cannot take points back: after a resume the steps that are made again stand there twice.
    """

    def __init__(self, config: Config, run_dir: Path, resume_step: int = 0):
        self._trackio = require("trackio")
        self._trackio.init(
            project=config.monitor.project,
            name=config.run.name,
            config=dataclasses.asdict(config),
            resume="allow" if resume_step else "never",
            auto_log_cpu=False,  # metrics.jsonl has memory and utilisation already, by phase
            auto_log_gpu=False,
        )

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._trackio.log(finite(metrics), step=step)

    def close(self) -> None:
        self._trackio.finish()


class SwanLab:
    """SwanLab. Offline (files in <run>/swanlab, to be sent with `swanlab sync`) unless SWANLAB_API_KEY or SWANLAB_MODE is set."""

    def __init__(self, config: Config, run_dir: Path, resume_step: int = 0):
        self._swanlab = require("swanlab")
        online: dict[str, Any] = {"mode": "online", "resume": "allow"}
        mode = os.environ.get("SWANLAB_MODE")
        choice = {"mode": mode} if mode else online if os.environ.get("SWANLAB_API_KEY") else {"mode": "offline"}
        self._swanlab.init(
            project=config.monitor.project,
            name=config.run.name,
            id=run_id(run_dir, "swanlab", is_new=not resume_step),
            config=dataclasses.asdict(config),
            log_dir=str(run_dir / "swanlab"),
            **choice,
        )

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._swanlab.log(finite(metrics), step=step)

    def close(self) -> None:
        self._swanlab.finish()
