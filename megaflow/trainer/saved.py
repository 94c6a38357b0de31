"""What a checkpoint of a run holds beside the model, and how a run takes it over."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from megaflow.checkpoint.directory import Retention
from megaflow.checkpoint.loading import load
from megaflow.checkpoint.saver import Saver
from megaflow.checkpoint.saving import Content
from megaflow.config.schema import RunConfig
from megaflow.parallel.mesh import Mesh
from megaflow.trainer.build import Parts
from megaflow.trainer.control import Control
from megaflow.trainer.guards import Guards
from megaflow.types import Stats


def saver(run: RunConfig, directory: Path, mesh: Mesh) -> Saver:
    return Saver(mesh, directory, Retention(run.keep_last, run.keep_best, run.best_metric, run.best_mode), run.async_save)


def content(step: int, parts: Parts, control: Control, guards: Guards, scores: Stats) -> Content:
    """All that going on after `step` needs. scores: what the step is judged by; only finite ones count."""
    extra = {"data": parts.data.state_dict(), "control": control.state_dict(), "guards": guards.state_dict()}
    if parts.sampler is not None:
        extra["sampler"] = parts.sampler.state_dict()
    if parts.rewards is not None and parts.rewards.model is not None:  # on rank 0, whose word counts
        extra["reward_model"] = parts.rewards.model.state_dict()
    finite = {name: value for name, value in scores.items() if math.isfinite(value)}
    return Content(step, parts.actor, extra, parts.critic, finite)


def take_over(path: Path, parts: Parts, mesh: Mesh, control: Control) -> dict[str, Any]:
    """Collective. Weights, optimizer, schedule, random states and KL controller of the checkpoint; returns all that was saved beside."""
    extra = load(path, parts.actor, mesh, parts.critic)
    if "control" in extra:  # checkpoints of version 0.1 have none
        control.kl.load_state_dict(extra["control"]["kl"])
    if parts.sampler is not None and "sampler" in extra:
        parts.sampler.load_state_dict(extra["sampler"])
    if parts.rewards is not None and parts.rewards.model is not None and "reward_model" in extra:
        parts.rewards.model.load_state_dict(extra["reward_model"])
    return extra
