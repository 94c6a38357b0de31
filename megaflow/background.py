"""Threads that call into C++ and must be gone before the interpreter is.

A thread that comes back from a store, a collective or another call of C++ into an interpreter that has ended is unwound through frames
that allow no exception, and the process aborts ("terminate called without an active exception", code 134), whatever its exit code was.
"""

from __future__ import annotations

import atexit
import threading
from collections.abc import Callable

LEAVE_S = 5.0  # of a thread that waits for a store whose process is stopped, and will not come back either


def background(work: Callable[[], None], name: str, stop: Callable[[], None]) -> None:
    """A daemon thread that does `work`, started. `stop` makes it return soon; it is called and waited for at the interpreter's end."""
    thread = threading.Thread(target=work, name=name, daemon=True)

    def end() -> None:
        stop()
        thread.join(LEAVE_S)

    thread.start()
    atexit.register(end)
