"""What a checkpoint of a run holds beside the model, and how a run takes it over."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

from megaflow.checkpoint.loading import load
from megaflow.checkpoint.saving import save
from megaflow.parallel.mesh import Mesh
from megaflow.trainer.build import Parts
from megaflow.trainer.control import Control
from megaflow.trainer.guards import Guards


def writer(parts: Parts, mesh: Mesh, control: Control, guards: Guards, keep_last: int) -> Callable[[Path, int], Any]:
    """For Run.save. Collective when called: (checkpoints directory, step)."""
    extra = {"data": parts.data.state_dict(), "control": control.state_dict(), "guards": guards.state_dict()}
    if parts.sampler is not None:
        extra["sampler"] = parts.sampler.state_dict()
    if parts.rewards is not None and parts.rewards.model is not None:  # on rank 0, whose word counts
        extra["reward_model"] = parts.rewards.model.state_dict()
    return functools.partial(save, trainable=parts.actor, mesh=mesh, extra=extra, keep_last=keep_last, critic=parts.critic)


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
