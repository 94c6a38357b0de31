"""Seconds per phase of a step."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager


class PhaseTimer:
    """`with timer.phase("sync"): ...`; `drain()` gives {"time/sync": seconds} and starts over.

    A phase inside another one counts for the inner only, so that the phases of a step add up to no more than the step.
    """

    def __init__(self, synchronize: Callable[[], None] = lambda: None, clock: Callable[[], float] = time.perf_counter):
        """synchronize waits for the device: without it a phase would end before its kernels do."""
        self._synchronize = synchronize
        self._clock = clock
        self._seconds: dict[str, float] = {}
        self._open: list[str] = []
        self._mark = 0.0

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        self._switch()
        self._open.append(name)
        try:
            yield
        finally:
            self._switch()
            self._open.pop()

    def _switch(self) -> None:
        """What has passed since the last switch belongs to the innermost open phase."""
        self._synchronize()
        now = self._clock()
        if self._open:
            self._seconds[self._open[-1]] = self._seconds.get(self._open[-1], 0.0) + now - self._mark
        self._mark = now

    def drain(self) -> dict[str, float]:
        """Seconds by metric name since the last call. A phase that is still open counts in the next one."""
        drained = {f"time/{name}": seconds for name, seconds in self._seconds.items()}
        self._seconds = {}
        return drained
