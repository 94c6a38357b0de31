"""Anonymous shared memory between a trainer rank and the processes of an engine, and how one end waits for the other.

It is a memfd, reached through /proc/<pid>/fd: a killed process leaves nothing behind, and /dev/shm may be small.
"""

from __future__ import annotations

import mmap
import os
import time
from collections.abc import Callable

import torch
from torch import Tensor

ERROR_BYTES = 4096
_POLL_S = 2e-5


class ChannelError(RuntimeError):
    """The other end failed."""


class EndLost(ChannelError):
    """The other end is gone, or silent."""


def nothing() -> None:
    return None


def map_words(fd: int, size: int) -> tuple[mmap.mmap, Tensor]:
    """Map a memfd of at least `size` bytes; also as int64 words (the first size // 8)."""
    if os.fstat(fd).st_size < size:
        os.ftruncate(fd, size)
    memory = mmap.mmap(fd, size)
    return memory, torch.frombuffer(memory, dtype=torch.int64, count=size // 8)


def open_fd(pid: int, fd: int) -> int:
    """Another process's open file. Same user and same PID namespace, or this fails."""
    return os.open(f"/proc/{pid}/fd/{fd}", os.O_RDWR)


def write_text(fd: int, text: str) -> None:
    """The whole content of a memfd."""
    os.ftruncate(fd, 0)
    with open(os.dup(fd), "wb") as file:
        file.seek(0)
        file.write(text.encode())


def read_text(pid: int, fd: int) -> str:
    with open(f"/proc/{pid}/fd/{fd}", "rb") as file:
        return file.read().decode()


def read_error(memory: mmap.mmap) -> str:
    """From the last ERROR_BYTES of a mapping."""
    return memory[-ERROR_BYTES:].rstrip(b"\0").decode(errors="replace")


def write_error(memory: mmap.mmap, message: str) -> None:
    text = message.encode()[: ERROR_BYTES - 1]
    memory[-ERROR_BYTES:] = text.ljust(ERROR_BYTES, b"\0")


def require_process(pid: int) -> None:
    if not os.path.exists(f"/proc/{pid}"):
        raise EndLost(f"the trainer process {pid} is gone")


def wait_until(ready: Callable[[], bool], check: Callable[[], None], timeout_s: float, what: str) -> None:
    """Poll. `check` is called now and then and raises when there is nothing to wait for any more; EndLost after timeout_s."""
    if ready():
        return
    deadline = time.monotonic() + timeout_s
    polls = 0
    while not ready():
        polls += 1
        if polls % 512 == 0:
            try:
                check()
            except Exception:
                if ready():  # it came between the last look and the check, and with it what the check found
                    return
                raise
            if time.monotonic() > deadline:
                raise EndLost(f"waited {timeout_s:.0f} s for {what}")
        time.sleep(_POLL_S)
