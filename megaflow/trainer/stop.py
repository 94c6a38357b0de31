"""Asked to stop: by a file STOP in the run directory, by SIGTERM (a scheduler) or SIGINT (Ctrl-C). The step under way is finished first."""

from __future__ import annotations

import os
import signal
import threading
import time
from pathlib import Path
from types import FrameType

# torchrun passes a Ctrl-C on to workers that the terminal has told already: what comes this soon is the same request.
SAME_REQUEST_S = 3.0


class StopRequest:
    """`reason` is empty until somebody asks. Signals reach each process apart, so rank 0's word counts (Run shares it)."""

    def __init__(self, directory: Path):
        self.file = directory / "STOP"
        self._signal = ""
        self._when = 0.0
        self._previous: dict[int, object] = {}

    def install(self) -> None:
        """Take over SIGTERM and SIGINT; only the main thread may."""
        if threading.current_thread() is threading.main_thread():
            self._previous = {number: signal.signal(number, self._handle) for number in (signal.SIGTERM, signal.SIGINT)}

    def restore(self) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)
        self._previous = {}

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self._signal and number == signal.SIGINT and time.monotonic() - self._when > SAME_REQUEST_S:
            raise KeyboardInterrupt
        if not self._signal:
            self._signal, self._when = signal.Signals(number).name, time.monotonic()
            # not print: the main thread may be inside one
            os.write(2, f"{self._signal}: the run will save at the end of this step and stop (Ctrl-C again: at once)\n".encode())

    def reason(self) -> str:
        """Why the run shall stop, or nothing."""
        return self._signal or (f"found {self.file}" if self.file.exists() else "")

    def clear(self) -> bool:
        """Remove the STOP file, so that the next start does not stop at once. True if there was one."""
        existed = self.file.exists()
        self.file.unlink(missing_ok=True)
        return existed
