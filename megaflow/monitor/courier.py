"""The watchdog's way to other ranks: a store between them. A store whose process is stopped never answers, so a thread of its own asks."""

from __future__ import annotations

import contextlib
import json
import queue
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import torch.distributed as dist

from megaflow.background import background

STALL = "stall"
ASK_S = 5.0  # then the store counts as silent


class Courier:
    """stall: what the first rank that saw a stall has told the others, or None.

    told   rank -> (facts that it last told, monotonic time when they were seen to be new); asked for with `wants_told`
    tell_s seconds between two tellings, and two askings: with many ranks the store has other things to do
    """

    def __init__(self, store: dist.Store, rank: int, world_size: int, period_s: float, tell_s: float):
        self.store, self.rank, self.world_size, self.period_s, self.tell_s = store, rank, world_size, period_s, tell_s
        self.stall: dict[str, Any] | None = None
        self.telling: dict[str, Any] | None = None  # this rank's facts, for ranks on other hosts; None: nothing to tell
        self.told: dict[int, tuple[dict[str, Any], float]] = {}
        self.wants_told = False
        self._jobs: queue.SimpleQueue[tuple[Callable[[], Any], Future]] = queue.SimpleQueue()
        self._closed = threading.Event()
        background(self._work, "watchdog-courier", self.close)

    def ask(self, job: Callable[[], Any]) -> Any:
        """The result of a job with the store. Raises TimeoutError when the store is silent."""
        future: Future = Future()
        self._jobs.put((job, future))
        try:
            return future.result(ASK_S)
        except dist.DistError as e:
            raise TimeoutError(str(e)) from e

    def announce(self, stall: dict[str, Any]) -> dict[str, Any]:
        """Tell all ranks. The first one to do so is heard; returns what stands."""
        self.stall = json.loads(self.ask(lambda: self.store.compare_set(STALL, "", json.dumps(stall))))
        return self.stall

    def put(self, key: str, value: Any) -> None:
        self.ask(lambda: self.store.set(key, json.dumps(value)))

    def fetch(self, keys: list[str]) -> dict[str, Any]:
        """Those that are there."""
        return self.ask(lambda: {key: json.loads(self.store.get(key)) for key in keys if self.store.check([key])})

    def close(self) -> None:
        self._closed.set()
        self._jobs.put((lambda: None, Future()))  # it need not wait for a job any more

    def _work(self) -> None:
        looked = told = 0.0
        while not self._closed.is_set():
            with contextlib.suppress(queue.Empty):
                _do(*self._jobs.get(timeout=self.period_s))
            now = time.monotonic()
            with contextlib.suppress(dist.DistError):  # the store is gone: PeerWatch ends the run
                if now - looked >= self.period_s:
                    looked = now
                    self._look_for_stall()
                if now - told >= self.tell_s:
                    told = now
                    self._exchange()

    def _look_for_stall(self) -> None:
        if self.stall is None and self.store.check([STALL]):
            self.stall = json.loads(self.store.get(STALL))

    def _exchange(self) -> None:
        if self.telling is not None:
            self.store.set(f"told{self.rank}", json.dumps(self.telling))
        keys = [f"told{r}" for r in range(self.world_size) if r != self.rank]
        if self.wants_told and self.store.check(keys):
            for key, value in zip(keys, self.store.multi_get(keys), strict=True):
                self._hear(int(key.removeprefix("told")), json.loads(value))

    def _hear(self, rank: int, facts: dict[str, Any]) -> None:
        if rank not in self.told or self.told[rank][0] != facts:
            self.told[rank] = (facts, time.monotonic())


def _do(job: Callable[[], Any], future: Future) -> None:
    try:
        future.set_result(job())
    except Exception as e:  # raised where the job was given
        future.set_exception(e)
