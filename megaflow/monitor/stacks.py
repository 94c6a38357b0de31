"""Python stacks of processes that do not answer any more. SIGUSR2 makes a prepared process write those of all its threads.

The signal's handler is faulthandler's, in C: it needs neither the GIL nor the main thread. It writes to a memfd of the process, which
whoever sent the signal reads through /proc. So `kill -USR2 PID` does no harm to a run.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import shutil
import signal
import subprocess
import time
from pathlib import Path
from typing import BinaryIO

NAME = "megaflow-stacks"
SIGNAL = signal.SIGUSR2
WAIT_S = 2.0  # for a process to write
_files: dict[int, BinaryIO] = {}  # by process id, for a fork inherits it; faulthandler keeps only the descriptor's number


def install() -> None:
    """Prepare this process."""
    pid = os.getpid()
    if pid not in _files:
        _files[pid] = os.fdopen(os.memfd_create(f"{NAME}-{pid}"), "w+b", buffering=0)
        faulthandler.register(SIGNAL, _files[pid], all_threads=True, chain=False)


def own(path: Path) -> None:
    """Append the stacks of this process to a file."""
    with path.open("a") as file:
        faulthandler.dump_traceback(file, all_threads=True)


def of_process(pid: int, wake: bool = False) -> str:
    """Stacks of another prepared process of this user; "" if it is not prepared or does not react. wake: it is stopped, let it go on."""
    box = _box(pid)
    if box is None:
        return ""
    with contextlib.suppress(OSError), open(box, "rb") as file:
        file.seek(0, os.SEEK_END)
        os.kill(pid, SIGNAL)  # it has our memfd open, so it is prepared
        if wake:
            os.kill(pid, signal.SIGCONT)
        return _whole(file)
    return ""


def main_thread(text: str) -> str:
    """Of such stacks: the last one, for threads come newest first."""
    return text.strip().rpartition("\n\n")[2]


def _box(pid: int) -> str | None:
    """Path of the memfd that a prepared process writes to."""
    with contextlib.suppress(OSError):
        for entry in os.scandir(f"/proc/{pid}/fd"):
            with contextlib.suppress(OSError):
                if os.readlink(entry.path).split(" ")[0] == f"/memfd:{NAME}-{pid}":
                    return entry.path
    return None


def _whole(file: BinaryIO) -> str:
    """What comes in, until nothing has come for a while."""
    text, quiet, deadline = b"", 0, time.monotonic() + WAIT_S
    while time.monotonic() < deadline and not (text and quiet >= 3):
        more = file.read()
        text, quiet = text + more, 0 if more else quiet + 1
        time.sleep(0.03)
    return text.decode(errors="replace")


def by_py_spy(pid: int) -> str:
    """With py-spy, if it is there and may look: also of processes that are not prepared."""
    tool = shutil.which("py-spy")
    if tool is None:
        return ""
    command = [tool, "dump", "--nonblocking", "--pid", str(pid)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, stdin=subprocess.DEVNULL)
    except subprocess.TimeoutExpired:
        return "py-spy: no answer within 10 s\n"
    return done.stdout if done.returncode == 0 else f"py-spy: {done.stderr.strip()}\n"


def state(pid: int) -> str:
    """What the kernel says: e.g. "T (stopped)", "R (running)"; "gone"."""
    with contextlib.suppress(OSError):
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith("State:"):
                return line.removeprefix("State:").strip().replace("\t", " ")
    return "gone"
