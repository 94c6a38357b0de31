"""The process that an engine lives in: started in a session of its own, and ended with all that belongs to that session."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil

GONE_WITHIN_S = 20.0  # after SIGKILL: a process of many GB on a GPU takes a while to be taken down


def start_host(descriptor: int, environment: dict[str, str]) -> subprocess.Popen:
    """engine_host.serve at the end `descriptor` of a pipe. In a session of its own: Ctrl-C and torchrun's SIGTERM are the trainer's."""
    code = f"from megaflow.rollout.engine_host import serve; serve({descriptor}, {os.getpid()})"
    command = [sys.executable, "-P", "-c", code]
    return subprocess.Popen(command, pass_fds=(descriptor,), env=environment, stdin=subprocess.DEVNULL, start_new_session=True)


def kill_session(host: subprocess.Popen) -> None:
    """SIGKILL, which a stopped process obeys too, to the host and to whoever is in its session; returns when they are gone, and with them
    what they held of the device, and their message queues in shared memory."""
    members = session_of(host.pid)
    for p in members:
        with contextlib.suppress(psutil.NoSuchProcess):
            p.send_signal(signal.SIGKILL)
    host.wait(GONE_WITHIN_S)
    deadline = time.monotonic() + GONE_WITHIN_S
    while any(map(_lives, members)) and time.monotonic() < deadline:
        time.sleep(0.01)
    for p in members:
        for left in Path("/dev/shm").glob(f"sgl_shm_mq_{p.pid}_*"):
            left.unlink(missing_ok=True)


def session_of(leader: int) -> list[psutil.Process]:
    """The living processes of the session that `leader` began; its number is taken as long as one of them lives."""
    return [p for p in psutil.process_iter() if _session(p.pid) == leader and _lives(p)]


def _session(pid: int) -> int:
    with contextlib.suppress(OSError):
        return os.getsid(pid)
    return -1


def _lives(p: psutil.Process) -> bool:
    with contextlib.suppress(psutil.Error):
        return p.is_running() and p.status() != psutil.STATUS_ZOMBIE
    return False
