"""Traces of chosen steps: what torch does on each rank, and the phases of all ranks on one time line, both in Chrome's trace format.

    <run>/profile/rank_0.json.gz   torch's profiler, from the first to the last of the steps (chrome://tracing, ui.perfetto.dev)
    <run>/profile/phases.json      one row a rank, by the hosts' clocks
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from megaflow.monitor.metrics import replace_text

Event = tuple[str, int, float, float]  # phase, step, begin and end in seconds since 1970


class Profiler:
    """Of one rank. Idle, and all but free, outside of `steps`."""

    def __init__(self, directory: Path, rank: int, steps: set[int]):
        self.directory, self.rank, self.steps = directory, rank, steps
        self.events: list[Event] = []
        self._step = 0
        self._trace: Any = None

    def begin_step(self, step: int) -> bool:
        """True once: when the last of the steps lies behind, and `take_events` is to be collected from all ranks."""
        self._step = step
        if self._trace is None and step in self.steps:
            self._start()
        is_over = self._trace is not None and step > max(self.steps)
        if is_over:
            self.end()
        return is_over

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        if self._trace is None:
            yield
            return
        import torch

        begin = time.time()
        with torch.profiler.record_function(f"phase: {name}"):
            yield
        if self._step in self.steps:
            self.events.append((name, self._step, begin, time.time()))

    @property
    def is_tracing(self) -> bool:
        return self._trace is not None

    def end(self) -> None:
        """Write this rank's trace, if one is being taken."""
        if self._trace is None:
            return
        trace, self._trace = self._trace, None
        self.steps = set()  # each run takes one trace: a second would overwrite it
        trace.stop()
        self.directory.mkdir(parents=True, exist_ok=True)
        trace.export_chrome_trace(str(self.directory / f"rank_{self.rank}.json.gz"))

    def _start(self) -> None:
        import torch

        kinds = [torch.profiler.ProfilerActivity.CPU]
        if torch.version.cuda and torch.cuda.is_available():
            kinds.append(torch.profiler.ProfilerActivity.CUDA)
        self._trace = torch.profiler.profile(activities=kinds)
        self._trace.start()


def write_timeline(path: Path, by_rank: list[list[Event]]) -> None:
    """phases.json from every rank's events. Times are microseconds since the first event of all."""
    start = min((event[2] for events in by_rank for event in events), default=0.0)
    rows: list[dict[str, Any]] = [{"name": "process_name", "ph": "M", "pid": 0, "args": {"name": "phases"}}]
    for rank, events in enumerate(by_rank):
        rows.append({"name": "thread_name", "ph": "M", "pid": 0, "tid": rank, "args": {"name": f"rank {rank}"}})
        for name, step, begin, end in events:
            times = {"ts": (begin - start) * 1e6, "dur": (end - begin) * 1e6}
            rows.append({"name": name, "ph": "X", "pid": 0, "tid": rank, **times, "args": {"step": step}})
    path.parent.mkdir(parents=True, exist_ok=True)
    replace_text(path, json.dumps({"traceEvents": rows, "displayTimeUnit": "ms"}))
