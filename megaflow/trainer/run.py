"""A run as its loop sees it: where it begins, when it saves, measures and stops, and what it leaves behind."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal

from megaflow.config.schema import Config
from megaflow.config.steps import parse_steps
from megaflow.monitor import TRACKERS, progress
from megaflow.monitor.console import Console, banner
from megaflow.monitor.metrics import Metrics
from megaflow.monitor.plot import draw_curve
from megaflow.monitor.profiler import Profiler, write_timeline
from megaflow.monitor.prometheus import Exporter
from megaflow.monitor.watchdog import Watchdog
from megaflow.parallel.comm import error_text
from megaflow.trainer import rundir
from megaflow.trainer.disk import RunDisk, gone
from megaflow.trainer.environment import add_to_environment, write_environment
from megaflow.trainer.logs import LOGGER, RankLog
from megaflow.trainer.meters import Meters
from megaflow.trainer.samples import write_samples
from megaflow.trainer.startup import Startup
from megaflow.trainer.status import STOPPED_EXIT_CODE, StatusFile, outcome, read_status, state_of_exit_code
from megaflow.trainer.stop import StopRequest
from megaflow.trainer.watched import watch
from megaflow.types import DivergedError, Sample, UserError

if TYPE_CHECKING:  # it would import Megatron
    from megaflow.checkpoint.directory import Best


class Run:
    """`with Run.open(cfg, mesh, find_checkpoint) as run: ... return run.finish()`

    resume_step        the last step that the loaded checkpoint contains; 0: a new run
    resume_checkpoint  its path, or None
    checkpoints_dir    where checkpoints go
    steps_total        the last step
    """

    def __init__(self, cfg: Config, mesh: Any, find_checkpoint: rundir.FindCheckpoint):
        self.cfg, self.mesh = cfg, mesh
        self.directory = Path(cfg.run.root) / cfg.run.name
        self.checkpoints_dir = self.directory / "checkpoints"
        self.steps_total = cfg.run.steps
        self.resume_step, self.resume_checkpoint = 0, None
        self.step = 0
        self.stop = StopRequest(self.directory)
        self.stop_reason = ""
        self.exit_code: int | None = None
        self._find = find_checkpoint
        self._meters = Meters(cfg, mesh)
        self._profiler = Profiler(self.directory / "profile", mesh.rank, parse_steps(cfg.profile.steps))
        self.startup: Startup | None = None  # set by who builds the run's parts; told with the first metrics
        self._console = Console(cfg.run.steps)
        self._status = StatusFile(self.directory / "status.json")
        self._disk: RunDisk | None = None  # on rank 0
        self._exporter: Exporter | None = None
        self._watchdog: Watchdog | None = None
        self._mark = time.perf_counter()
        self._stop_asked_at = -1
        self._noted: dict[str, float] = {}
        self._best = ""
        self.before_diverging: Callable[[], None] = lambda: None  # what all ranks do together before the run ends as diverged

    # --- opening ---------------------------------------------------------------------------------------------------

    @classmethod
    def open(cls, cfg: Config, mesh: Any, find_checkpoint: rundir.FindCheckpoint) -> Run:
        """Collective. Claim the run directory and find where to begin.

        Raises ConfigError when the directory is in use, is used and run.resume forbids it, is finished, or its settings do not fit.
        """
        run = cls(cfg, mesh, find_checkpoint)
        start = mesh.on_rank0(run._open_directory)
        run.step, run.resume_step, run.resume_checkpoint = start.step, start.step, start.checkpoint
        run._log_file = RankLog(run.directory / "logs" / f"rank_{mesh.rank}.log", mesh.rank == 0)
        run.stop.install()
        try:
            run._watchdog = watch(cfg, mesh, run.directory, run._status)
            mesh.on_rank0(run._open_monitors, start)
        except BaseException as error:
            run.record(error)
            run.close()
            raise
        return run

    def _open_directory(self) -> rundir.Start:
        self._lock = rundir.claim(self.directory)
        try:
            start = rundir.decide(self.cfg, self.directory, self._find)
        except Exception:
            self._lock.close()  # the directory stays as it was, and free
            raise
        rundir.prepare(self.cfg, self.directory, start)
        is_own = start.checkpoint is not None and start.checkpoint.resolve().is_relative_to(self.checkpoints_dir.resolve())
        self._status.begin(start.step, self.cfg.run.steps, start.step if is_own else None)
        self._disk = RunDisk(self.directory, self._status.path.name)
        return start

    def _open_monitors(self, start: rundir.Start) -> None:
        trackers = [TRACKERS.get(name) for name in self.cfg.monitor.trackers]
        env = write_environment(self.directory / "env.json", self.mesh.world_size)
        is_new = start.checkpoint is None
        self._metrics = Metrics(self.directory / "metrics.jsonl", None if is_new else start.step)
        self._trackers = [tracker(self.cfg, self.directory, start.step) for tracker in trackers]
        gpus = ", ".join(env["devices"]["gpus"]) or f"none ({env['devices']['cpus']} CPU cores)"
        names = [f"{name} {version}" for name, version in env["versions"].items() if version]
        facts = {"ranks": str(self.mesh.world_size), "GPUs": gpus, "versions": ", ".join(names[:6]), "warnings": f"{self.directory}/logs/"}
        self.say(banner(self.cfg.run.name, self.directory, start.step, self.cfg.run.steps, facts))
        self._serve_metrics()
        for notice in start.notices:
            self.say(notice)
        if self._meters.notice:
            LOGGER.info(self._meters.notice)
        if self.stop.clear():
            self.say(f"removed a STOP file that was left in {self.directory}")

    def _serve_metrics(self) -> None:
        if self.cfg.monitor.prometheus_port < 0:
            return
        self._exporter = Exporter(self.cfg, lambda: (read_status(self._status.path) or {}).get("state", ""), self.cfg.run.steps)
        self._status.update(prometheus=self._exporter.url)
        self.say(f"metrics for Prometheus: {self._exporter.url}")

    def say(self, text: str) -> None:
        """To the console and the log of rank 0."""
        if self.mesh.rank == 0:
            with contextlib.suppress(OSError):  # where output goes the disk may be full, or the reader gone; the log has the same
                print(text, flush=True)
            LOGGER.info(text)

    # --- the loop --------------------------------------------------------------------------------------------------

    def steps(self) -> Iterator[int]:
        """Collective. Step numbers from the resume point on, until run.steps or until somebody asks to stop."""
        self._mark = time.perf_counter()
        while self.step < self.steps_total and not self._is_stopping():
            self.step += 1
            if self._profiler.begin_step(self.step):
                self._write_timeline()
            progress.enter("loop", self.step)
            yield self.step

    def end_after(self, step: int) -> None:
        """The data has ended: `step` is the last one."""
        self.steps_total = step

    def _is_stopping(self) -> bool:
        """Collective. Asked once a step, and the answer stands for that step: all ranks must leave the loop together, after saving."""
        if not self.stop_reason and self._stop_asked_at != self.step:
            self._stop_asked_at = self.step
            self.stop_reason = self.mesh.on_rank0(self.stop.reason)
        return bool(self.stop_reason)

    def ends_after(self, step: int) -> bool:
        """Collective. Whether the run ends after `step`: it is the last one, or somebody has asked to stop."""
        return self._is_stopping() or step >= self.steps_total

    def due(self, what: Literal["save", "eval"], step: int) -> bool:
        """Collective for "save". Whether a checkpoint or an evaluation is due after `step` (0: before the first step)."""
        is_last = step >= self.steps_total
        if what == "eval":
            settings = self.cfg.eval
            if step == 0:
                return settings.before
            return (is_last and settings.after) or (settings.every > 0 and step % settings.every == 0)
        is_stopping = self._is_stopping()
        every = self.cfg.run.save_every
        return is_stopping or (is_last and self.cfg.run.save_final) or (every > 0 and step % every == 0)

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Measure a phase of the step: time/<name>, mem/<name>/*, and on CUDA device/*_<name>."""
        with progress.phase(name, self.step), self._profiler.phase(name), self._meters.phase(name):
            yield

    def memory_gb(self) -> float:
        """Memory of this rank now, 1e9 bytes (for mem/after_sleep_gb)."""
        return self._meters.memory_gb()

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Collective. Write the step's metrics, once a step and before it is saved; adds times, memory and tokens per second.

        Rank 0's metrics count. A save is measured with the step after it.
        """
        self.mesh.on_rank0(self._log, step, dict(metrics))

    def _log(self, step: int, metrics: dict[str, float]) -> None:
        now = time.perf_counter()
        seconds, self._mark = now - self._mark, now
        measured = self._meters.drain()
        if step > 0:
            measured["time/step"] = seconds
            if "batch/tokens" in metrics:
                measured["perf/tokens_per_s"] = metrics["batch/tokens"] / seconds
                measured["perf/tokens_per_s_per_rank"] = metrics["batch/tokens"] / seconds / self.mesh.world_size
        everything = measured | self._startup_metrics() | self._noted | metrics
        self._noted = {}
        self._patiently(self._metrics.write, step, everything)
        for text in self._meters.warnings(everything):
            LOGGER.warning(text)
        self._tell_trackers(step, everything)
        if self._exporter is not None:
            self._exporter.log(step, everything)
        self.say(self._console.line(step, everything))
        self._update_status(step=step)

    def _patiently(self, write: Callable[..., None], *args: Any, **kwargs: Any) -> None:
        assert self._disk is not None, "rank 0 writes"
        self._disk.patiently(write, *args, **kwargs)

    def _update_status(self, **fields: Any) -> None:
        self._patiently(self._status.update, **fields)

    def _tell_trackers(self, step: int, metrics: Mapping[str, float]) -> None:
        """A tracker is a view of metrics.jsonl: its service may be away, or its disk full, and the run goes on without it."""
        for tracker in self._trackers:
            try:
                tracker.log(step, metrics)
            except Exception as error:  # each package has its own kinds
                LOGGER.warning("%s did not take the metrics of step %d: %s", type(tracker).__name__, step, error_text(error, 0, 1))

    def _startup_metrics(self) -> dict[str, float]:
        """With the first metrics only; also to the console, the log and env.json."""
        if self.startup is None:
            return {}
        startup, self.startup = self.startup, None
        self.say(startup.text())
        add_to_environment(self.directory / "env.json", {"process_began": startup.process_began, "startup_s": startup.facts()})
        return startup.metrics()

    def go_back(self, step: int, given_up: int, metrics: Mapping[str, float]) -> None:
        """Collective. The run goes on after `step`, the checkpoint that it went back to; `metrics` of step `given_up` are not written yet.

        metrics.jsonl has each step once: lines of later steps move to metrics_rolled_back.jsonl. Trackers keep what they were told.
        """
        self.step, self._stop_asked_at = step, -1
        self.mesh.on_rank0(self._go_back, step, given_up, dict(metrics))

    def _go_back(self, step: int, given_up: int, metrics: dict[str, float]) -> None:
        self._mark = time.perf_counter()
        measured = self._meters.drain()
        self._metrics.go_back(step, self.directory / "metrics_rolled_back.jsonl", given_up, measured | metrics)
        rundir.drop_samples(self.directory, step)
        self._update_status(step=step, checkpoint=step)

    def tell_guards(self, events: Sequence[Mapping[str, Any]]) -> None:
        """On rank 0. The last alarms into status.json."""
        self._update_status(guard=list(events))

    def write_samples(self, step: int, samples: Sequence[Sample]) -> None:
        """samples/step_N.jsonl, from rank 0's samples."""
        if self.mesh.rank == 0:
            self._patiently(write_samples, self.directory / "samples", step, samples, self.cfg.monitor.samples_per_step)

    def note(self, metrics: Mapping[str, float]) -> None:
        """Figures that go with the next step's metrics."""
        self._noted |= metrics

    def saved(self, step: int, best: Best | None = None) -> None:
        """Collective. The checkpoint of `step` is whole; `best` is the best by run.best_metric now."""
        self.mesh.on_rank0(self._saved, step, best)

    def raise_if_deleted(self) -> None:
        """Collective. Raises LostError when the run directory is not there and its file system is: it will not come back."""
        self.mesh.on_rank0(self._raise_if_deleted)

    def _raise_if_deleted(self) -> None:
        if self._disk is not None and self._disk.is_deleted():
            raise gone(self.directory)

    def _saved(self, step: int, best: Best | None) -> None:
        self._update_status(checkpoint=step)
        if best is not None:
            self._best = f"best checkpoint: {best.path} ({best.metric} {best.value:.6g})"
            self._update_status(best={"step": best.step, "metric": best.metric, "value": best.value, "path": str(best.path)})

    # --- the end ---------------------------------------------------------------------------------------------------

    def finish(self) -> int:
        """Collective. Write how it ended, draw the curve, say where to look. Returns the exit code: 0 done, 75 stopped and resumable."""
        if self._watchdog is not None:
            self._watchdog.let_it_end()
        if self._profiler.is_tracing:
            self._profiler.end()
            self._write_timeline()
        self.exit_code = self.mesh.on_rank0(self._finish)
        return self.exit_code

    def _write_timeline(self) -> None:
        """Collective."""
        by_rank = self.mesh.all_gather(self._profiler.events)
        self.mesh.on_rank0(write_timeline, self._profiler.directory / "phases.json", by_rank)
        self.say(f"traces of the profiled steps: {self._profiler.directory}/")

    def _finish(self) -> int:
        is_done = self.step >= self.steps_total
        if self.cfg.monitor.plot and draw_curve(self.directory / "metrics.jsonl", self.directory / "curve.png", self.cfg.run.name):
            self.say(f"learning curve: {self.directory}/curve.png")
        self.say(f"samples: python tools/view_samples.py {self.directory}")
        if self._best:
            self.say(self._best)
        self._close_trackers()
        self.stop.clear()
        if is_done:
            self._patiently(self._status.end, "done", 0, "")
            self.say(f"done: {self.step} steps")
            return 0
        self._patiently(self._status.end, "stopped", STOPPED_EXIT_CODE, self.stop_reason)
        self.say(f"stopped after step {self.step} ({self.stop_reason}); the same command goes on from its last checkpoint")
        return STOPPED_EXIT_CODE

    def _close_trackers(self) -> None:
        for tracker in self._trackers:
            try:
                tracker.close()
            except Exception as error:
                LOGGER.warning("%s did not close: %s", type(tracker).__name__, error_text(error, 0, 1))

    def record(self, error: BaseException) -> None:
        """Write into status.json and the log how the run fails, and tell the other ranks. A crash is told with its rank."""
        if self._watchdog is not None:
            self._watchdog.let_it_end()
        state, exit_code = outcome(error)
        message = error_text(error, self.mesh.rank, self.mesh.world_size)
        cause = self.mesh.watch.cause(error)
        if cause is not None:
            message, exit_code = cause
            state = state_of_exit_code(exit_code)
            print(f"[rank {self.mesh.rank}] ending: {message}", file=sys.stderr, flush=True)
        with contextlib.suppress(OSError):  # the disk may be what it fails of
            self._status.end(state, exit_code, message)
        LOGGER.error("%s: %s", state, message, exc_info=error)
        self.mesh.watch.report(message, exit_code)

    def __enter__(self) -> Run:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if isinstance(error, DivergedError):  # all ranks have it, at the same place
            self._before_diverging()
        lost = gone(self.directory) if isinstance(error, OSError) and not self.directory.exists() else None
        if error is not None:
            self.record(lost or error)
        self.close()
        if lost is not None:
            raise lost from error
        assert error is not None or self.exit_code is not None, "the loop ended without run.finish()"

    def _before_diverging(self) -> None:
        try:
            self.before_diverging()
        except UserError as error:  # the run has ended before it; its own end is what counts
            self.say(str(error))

    def close(self) -> None:
        """Let go of the directory, the signals and the log."""
        self.stop.restore()
        if self._watchdog is not None:
            self._watchdog.close()
        if self._exporter is not None:
            self._exporter.close()
        self._meters.close()
        self._log_file.close()
        if self.mesh.rank == 0:
            self._lock.close()
