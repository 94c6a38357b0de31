"""The run held to its guards: judge each step, do what was decided, and go back to a checkpoint when it comes to that.

Going back restores weights, optimizer, schedule, random states and the KL controller of the last checkpoint. The data cursor is not
turned back: no prompt of the steps given up comes again before the others have. What guards have changed and counted stays as well.
"""

from __future__ import annotations

import json
import math
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from megaflow.checkpoint.directory import find, previous
from megaflow.checkpoint.saving import Content, Saved
from megaflow.config.schema import Config
from megaflow.monitor.metrics import replace_text
from megaflow.monitor.progress import mark
from megaflow.registry import nearest
from megaflow.trainer import disk, saved
from megaflow.trainer.build import Parts
from megaflow.trainer.control import Control
from megaflow.trainer.guards import Guards, Verdict
from megaflow.trainer.run import Run
from megaflow.trainer.samples import write_samples
from megaflow.types import DivergedError, LostError, Sample, Stats, UserError

RECORD = "rolled_back.json"  # how the run goes on from the checkpoint that it went back to, should it be killed before the next one


class Supervisor:
    """control: what the run changes of its settings; guards: what it is held to. Made on every rank."""

    def __init__(self, cfg: Config, run: Run, parts: Parts):
        self.cfg, self.run, self.parts, self.mesh = cfg, run, parts, run.mesh
        self.control, self.guards = Control(cfg), Guards(cfg.guard)
        self.record = run.directory / RECORD
        self.saver = saved.saver(cfg.run, run.checkpoints_dir, self.mesh)

    @classmethod
    def begin(cls, cfg: Config, run: Run, parts: Parts) -> Supervisor:
        """Collective. Take over the checkpoint that the run found; without one, make sure that there is something to go back to."""
        supervisor = cls(cfg, run, parts)
        run.before_diverging = supervisor.settle
        if run.resume_checkpoint is not None:
            supervisor._resume(run.resume_checkpoint)
        elif supervisor.guards.may_roll_back:
            supervisor.save(0, {})
        return supervisor

    @property
    def settings(self) -> Config:
        """The configuration with the KL coefficient that the step under way has."""
        return self.control.settings()

    def _resume(self, path: Path) -> None:
        extra = saved.take_over(path, self.parts, self.mesh, self.control)
        record = self.mesh.on_rank0(_read_record, self.record, path)
        if record:
            extra |= record
            self._forget_kept_groups()
        self.parts.data.load_state_dict(extra["data"])
        if "control" in extra:
            self.control.load_state_dict(extra["control"])
            self.guards.load_state_dict(extra["guards"])
            self.control.apply(self.parts.trained)
            self.mesh.on_rank0(self.run.tell_guards, self.guards.events)  # what happened before the run was stopped is not forgotten
            self._say_scales()

    def _say_scales(self) -> None:
        rates = "actor.lr" if self.parts.critic is None else "actor.lr and critic.lr"
        scales = {rates: self.control.lr_scale, "algo.kl.coef": self.control.kl_scale}
        for key, scale in scales.items():
            if scale != 1.0:
                self.run.say(f"{key} stays times {scale:g}, as guards of the checkpoint's run have set it; divide {key} by that to undo it")

    def end_step(self, step: int, stats: Stats) -> None:
        """Collective, once a step and at its end. A checkpoint if one is due; else a look whether one that is being written is whole."""
        if self.run.due("save", step):
            self.save(step, stats)
        elif self.saver.is_writing:
            try:
                with self.run.phase("save"):
                    whole = self.saver.poll()
                self._tell(whole)
            except UserError as error:  # what was written beside the run did not come to its end: this step's is saved in its place
                self.run.say(str(error))
                self.save(step, stats)

    def save(self, step: int, stats: Stats) -> None:
        """Collective. A checkpoint of everything. With run.async_save it is written while the run goes on."""
        metric = self.cfg.run.best_metric
        if metric and step and not math.isfinite(stats.get(metric, math.nan)):
            self.run.say(f"the checkpoint of step {step} cannot be the best: {_lacking(metric, stats)}")
        scores = {metric: stats[metric]} if metric in stats else {}
        with self.run.phase("save"):
            self._until_written(saved.content(step, self.parts, self.control, self.guards, scores))
        self.run.note({"save/wait_s": self.saver.waited_s})

    def _until_written(self, content: Content) -> None:
        """Collective. As long as the disk does not take it the run waits, up to disk.PATIENCE_S; then LostError. The last one of the run
        is whole when this returns."""
        began = time.monotonic()
        while True:
            try:
                self._tell(self.saver.save(content))
                if self.run.ends_after(content.step):
                    self._tell(self.saver.settle())
                return
            except UserError as error:
                self.run.raise_if_deleted()
                if self.mesh.on_rank0(lambda: time.monotonic() - began > disk.PATIENCE_S):
                    raise LostError(str(error)) from error
                self.run.say(f"{error}\nthe run tries again every {disk.PERIOD_S:g} s, up to {disk.PATIENCE_S:.0f} s")
                mark("waiting for the disk")
                time.sleep(disk.PERIOD_S)

    def settle(self) -> None:
        """Collective. Wait for the checkpoint that is being written, if there is one."""
        if self.saver.is_writing:
            with self.run.phase("save"):
                whole = self.saver.settle()
            self._tell(whole)

    def _tell(self, whole: list[Saved]) -> None:
        for each in whole:
            self.run.note({"save/write_s": each.write_s, "save/gb": each.num_bytes / 1e9})
            self.run.saved(each.step, each.best)

    def hold(self, step: int, stats: Stats, samples: list[Sample], gathered: list[Sample]) -> bool:
        """Collective, after the update. Adds algo/* and guard/* to `stats`. True: the run went back, and this step is not part of it.

        samples: this rank's, with their tokens; gathered: all of them on rank 0. Raises DivergedError when a guard says so.
        """
        stats |= self.control.observe(stats)
        verdict: Verdict = self.mesh.on_rank0(self.guards.judge, step, stats)
        if verdict.has("lower_lr"):
            self.control.lower_lr(self.cfg.guard.factor, self.parts.trained)
        if verdict.has("raise_kl"):
            self.control.raise_kl(self.cfg.guard.factor)
        stats |= verdict.stats | {"guard/lr_scale": self.control.lr_scale}
        news = [alarm for alarm in verdict.alarms if alarm.is_news]
        for alarm in news:
            self.run.say(str(alarm))
        if news:
            self.mesh.on_rank0(self.run.tell_guards, self.guards.events)
        if verdict.has("rollback"):
            self._go_back(step, verdict, stats, samples, gathered)
        return verdict.has("rollback")

    def _go_back(self, step: int, verdict: Verdict, stats: Stats, samples: list[Sample], gathered: list[Sample]) -> None:
        place = self.mesh.on_rank0(_unused, self.run.directory / "quarantine" / f"step_{step}")
        self._quarantine(place, verdict, samples, gathered)
        self.settle()  # the newest checkpoint may be one that is being written
        target, path = self.mesh.on_rank0(self._target, place)
        self.mesh.on_rank0(self._write_record, target)
        self.run.go_back(target, step, stats)
        saved.take_over(path, self.parts, self.mesh, self.control)
        self._forget_kept_groups()
        self.control.apply(self.parts.trained)
        if self.parts.data.exhausted:
            self.run.end_after(target)
        self.run.say(f"went back from step {step} to the checkpoint of step {target}; the batch of step {step} is in {place}")

    def _forget_kept_groups(self) -> None:
        """Groups that dynamic sampling had kept at the checkpoint: they may be part of the batch that went wrong."""
        if self.parts.sampler is not None:
            self.parts.sampler.load_state_dict({"groups": 0, "samples": []})

    def _quarantine(self, place: Path, verdict: Verdict, samples: list[Sample], gathered: list[Sample]) -> None:
        """Collective. What was trained on: samples.jsonl and reason.json by rank 0, tokens and log-probabilities by each replica."""
        self.mesh.on_rank0(_write_reason, place, verdict)
        error = None
        try:
            if self.mesh.rank == 0:
                write_samples(place, 0, gathered, -1).rename(place / "samples.jsonl")
            if self.mesh.rank == self.mesh.replicas[self.mesh.dp.index][0]:
                torch.save([_tokens(s) for s in samples], place / f"tokens_{self.mesh.dp.index}.pt")
        except OSError as e:
            error = e
        self.mesh.all_ok(error)

    def _target(self, place: Path) -> tuple[int, Path]:
        """On rank 0. The newest checkpoint; or the one before it, if the run went back to it already and has made none since."""
        found = find(self.run.checkpoints_dir)
        if found is None:
            raise DivergedError(f"guard: there is no whole checkpoint in {self.run.checkpoints_dir} to go back to; the batch is in {place}")
        step, path = found
        earlier = previous(path) if self.guards.went_back_to == step else None
        if earlier is not None:
            path.rename(place / path.name)  # or the next start would go on from it
            step, path = int(earlier.name.removeprefix("step_")), earlier
        self.guards.rolled_back(step)
        return step, path

    def _write_record(self, target: int) -> None:
        state = {"step": target, "data": self.parts.data.state_dict()}
        state |= {"control": self.control.state_dict(), "guards": self.guards.state_dict()}
        replace_text(self.record, json.dumps(state))


def _lacking(metric: str, stats: Stats) -> str:
    if metric in stats:
        return f"its {metric} is {stats[metric]}"
    return f"the step has no run.best_metric={metric}{nearest(metric, stats)}"


def _read_record(record: Path, checkpoint: Path) -> dict[str, Any]:
    """What differs from the checkpoint if it is the one that the run went back to; else nothing."""
    if not record.exists():
        return {}
    state = json.loads(record.read_text())
    is_the_one = checkpoint.parent.parent.resolve() == record.parent.resolve() and checkpoint.name == f"step_{state['step']:06d}"
    return {name: state[name] for name in ("data", "control", "guards")} if is_the_one else {}


def _unused(place: Path) -> Path:
    """The same step can be given up twice: step_4, step_4_2, ..."""
    number = 2
    first = place
    while place.exists():
        place = first.with_name(f"{first.name}_{number}")
        number += 1
    return place


def _write_reason(place: Path, verdict: Verdict) -> None:
    place.mkdir(parents=True, exist_ok=True)
    replace_text(place / "reason.json", json.dumps([asdict(alarm) | {"text": str(alarm)} for alarm in verdict.alarms], indent=2) + "\n")


def _tokens(s: Sample) -> dict[str, Any]:
    names = ("group", "index", "response", "rollout_logp", "old_logp", "ref_logp", "reward", "advantage", "mini_batch")
    return {"prompt": s.prompt.tokens, **{name: getattr(s, name) for name in names}}
