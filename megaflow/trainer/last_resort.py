"""A step that cannot be made because something it needs is lost (engines, a reward service): what was learned until then is saved first."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from megaflow.checkpoint.directory import find
from megaflow.trainer import saved
from megaflow.trainer.build import Parts
from megaflow.trainer.supervisor import Supervisor
from megaflow.types import LostError, UserError


@contextlib.contextmanager
def saved_if_lost(supervisor: Supervisor, step: int) -> Iterator[None]:
    """Collective. Around what a step does before its update: after a LostError in it, which all ranks meet, step - 1 is saved if need be.

    The step's prompts come again after the next start, with the same seeds, as if the step had never begun.
    """
    before = Before(supervisor.parts)
    try:
        yield
    except LostError:
        _save_the_step_before(supervisor, step - 1, before)
        raise


class Before:
    """What a step changes before its update, as it was."""

    def __init__(self, parts: Parts):
        self.data = parts.data.state_dict_later()
        self.extra: dict[str, Any] = {}
        if parts.rewards is not None and parts.rewards.model is not None:
            self.extra["reward_model"] = parts.rewards.model.state_dict()
        self.kept = (list(parts.sampler.kept), parts.sampler.num_kept)


def _save_the_step_before(supervisor: Supervisor, step: int, before: Before) -> None:
    run, parts = supervisor.run, supervisor.parts
    supervisor.settle()
    newest = run.mesh.on_rank0(find, run.checkpoints_dir)
    if step == 0 or (newest is not None and newest[0] >= step):
        return
    with contextlib.suppress(LostError):  # of engines that are lost there is nothing to put to sleep
        parts.rollout.sleep(2)
    parts.actor.wake()
    parts.sampler.kept, parts.sampler.num_kept = before.kept
    content = saved.content(step, parts, supervisor.control, supervisor.guards, {})
    content.extra.update(before.extra, data=before.data())
    try:
        supervisor.saver.save(content)
        supervisor.settle()
        run.saved(step)
        run.say(f"saved step {step}, the last one that was whole")
    except UserError as error:  # the disk too; what the run ends of is what was lost first
        run.say(str(error))
