"""Scheduler processes that import SGLang beside the engine's host process instead of after it.

SGLang starts its schedulers when the host has imported everything, and each then imports the same again: ten seconds and more, one after
the other. Here they are started first and wait for their work. Written for sglang 0.5.15: `_launch_scheduler_processes` makes them by
`mp.Process(target, args)`, `start()`; `processes_from` puts ready ones in that place.
"""

from __future__ import annotations

import contextlib
import ctypes
import multiprocessing
import os
import signal
import types
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from typing import Any

PR_SET_PDEATHSIG = 1


class WarmProcess:
    """A process that imports SGLang and then runs what it is given. Otherwise like the multiprocessing.Process that it holds."""

    def __init__(self, context: Any):
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=_wait_for_work, args=(theirs,))
        self._process.start()
        theirs.close()
        self._work: tuple[Callable, tuple] | None = None

    def give(self, target: Callable, args: tuple) -> WarmProcess:
        self._work = (target, args)
        return self

    def start(self) -> None:
        """Runs what it was given, in the environment as it is now: SGLang sets variables of CUDA and NCCL and its own for its schedulers
        when it has read its arguments (CUDA_DEVICE_MAX_CONNECTIONS; NCCL_ALGO for deterministic inference)."""
        self._pipe.send((dict(os.environ), self._work))

    def __getattr__(self, name: str) -> Any:  # pid, name, exitcode, sentinel, is_alive, join, terminate, kill
        return getattr(self._process, name)


def _wait_for_work(pipe: Connection) -> None:
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    import setproctitle
    import sglang.srt.managers.scheduler  # noqa: F401  the slow part

    setproctitle.getproctitle()  # it looks for the place of the title, at its first call, and finds none once the environment has changed
    try:
        environment, (target, args) = pipe.recv()
    except EOFError:  # the host gave up
        return
    os.environ.update(environment)
    target(*args)


def start_warm(number: int, on_cuda: bool) -> list[WarmProcess]:
    """From the thread that will run the engine: they end with it."""
    context = multiprocessing.get_context("spawn")
    with _memory_saver() if on_cuda else contextlib.nullcontext():
        return [WarmProcess(context) for _ in range(number)]


def _memory_saver() -> contextlib.AbstractContextManager[None]:
    """Its library must be there when a process begins (LD_PRELOAD)."""
    from torch_memory_saver.hooks.mode_preload import configure_subprocess

    return configure_subprocess()


@contextlib.contextmanager
def processes_from(warm: list[WarmProcess], module: types.ModuleType) -> Iterator[None]:
    """For the time of the block, `module.mp.Process(target=..., args=...)` hands out these, in order."""
    left = list(warm)
    real = module.mp

    def take(target: Callable, args: tuple) -> WarmProcess:
        return left.pop(0).give(target, args)

    module.mp = types.SimpleNamespace(Process=take, Pipe=real.Pipe)
    try:
        yield
    finally:
        module.mp = real
