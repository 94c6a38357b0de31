"""Engines that are lost are started anew: how often that may be, how long it took, and which samples need not be made again."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable
from typing import Any, TypeVar

from megaflow.monitor import progress
from megaflow.parallel.mesh import Mesh
from megaflow.rollout.base import EngineError, EngineLost
from megaflow.rollout.engine_process import EngineProcess
from megaflow.types import LostError, Sample, Stats

log = logging.getLogger("megaflow.engines")
WINDOW_S = 3600.0
T = TypeVar("T")


class Restarts:
    """limit: restarts, of all engines that it watches together, within an hour. Every rank counts what all ranks meet."""

    def __init__(self, mesh: Mesh, limit: int):
        self.mesh, self.limit = mesh, limit
        self.times: deque[float] = deque()
        self._count, self._seconds = 0, 0.0

    def again(self, verb: Callable[[], T], mend: Callable[[], None]) -> T:
        """Collective. `verb()`; each time that an engine is lost in it, `mend()` and `verb()` again. Raises LostError past the limit."""
        while True:
            try:
                return verb()
            except EngineLost as lost:
                self._mend(lost, mend)

    def _mend(self, lost: EngineLost, mend: Callable[[], None]) -> None:
        began = time.monotonic()
        while True:
            self._require_patience(lost)
            log.warning("%s; it is started anew", lost)
            progress.mark("an engine is started anew")
            self._count += 1
            try:
                mend()
                break
            except EngineLost as another:
                lost = another
        seconds = time.monotonic() - began
        self._seconds += seconds
        log.warning("the engine is back after %.1f s; what it had not finished is made again", seconds)

    def _require_patience(self, lost: EngineLost) -> None:
        if not self.mesh.on_rank0(self._may_restart):  # by one clock
            raise LostError(
                f"{lost}. Engines were started anew {self.limit} times within an hour (rollout.max_restarts) and are lost again; "
                "the last checkpoint is untouched: find out why they end (their last words are above, and in the system's log), then "
                "start the same command again"
            ) from lost

    def _may_restart(self) -> bool:
        now = time.monotonic()
        while self.times and now - self.times[0] > WINDOW_S:
            self.times.popleft()
        self.times.append(now)
        return len(self.times) <= self.limit

    def drain(self) -> Stats:
        """Since the last time; nothing when no engine was lost."""
        if not self._count:
            return {}
        found = {"rollout/engine_restarts": float(self._count), "rollout/restart_s": self._seconds}
        self._count, self._seconds = 0, 0.0
        return found


def started(engine: EngineProcess) -> None:
    """Wait for its start. EngineLost when its process died; EngineError when it cannot start: it would not the next time either."""
    try:
        engine.await_start()
    except EngineLost as e:
        raise EngineLost(f"{engine.name} did not start: {e}") from e
    except EngineError as e:
        raise EngineError(f"{engine.name} did not start: {e}") from e


def restarted(engine: EngineProcess) -> None:
    """Wait for its start. It has started before with the same arguments, so whatever goes wrong now may go right the next time."""
    try:
        engine.await_start()
    except EngineError as e:
        raise EngineLost(f"{engine.name} did not start again: {e}") from e


class Finished:
    """Samples of a `generate` that did not come to its end: called again with the same arguments, it need not make these again."""

    def __init__(self) -> None:
        self._call: tuple[Any, ...] = ()
        self._samples: dict[tuple[int, int], Sample] = {}

    def of_call(self, *call: Any) -> dict[tuple[int, int], Sample]:
        """(group, index) -> sample, of the call with these arguments; to be filled."""
        if call != self._call:
            self._call, self._samples = call, {}
        return self._samples

    def clear(self) -> None:
        self._call, self._samples = (), {}
