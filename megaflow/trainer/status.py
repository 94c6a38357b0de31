"""status.json: what became of a run. torchrun turns every exit code into 1, so the truth is kept here."""

from __future__ import annotations

import errno
import json
import os
import socket
import threading
import time
from pathlib import Path
from typing import Any

from megaflow.monitor.intact import json_object
from megaflow.monitor.metrics import replace_text
from megaflow.trainer.relaunch import launcher
from megaflow.types import ConfigError, DivergedError, LostError, PreflightError, StalledError, UserError

STOPPED_EXIT_CODE = 75  # EX_TEMPFAIL: a scheduler may start the same command again
STATES = {ConfigError: "config", PreflightError: "preflight", DivergedError: "diverged", LostError: "lost", StalledError: "stalled"}


def outcome(error: BaseException) -> tuple[str, int]:
    """(state, exit code) of a run that ends with this error."""
    for kind, state in STATES.items():
        if isinstance(error, kind):
            return state, error.exit_code
    if isinstance(error, KeyboardInterrupt):
        return "crashed", 130
    return "crashed", error.exit_code if isinstance(error, UserError) else 1


def state_of_exit_code(exit_code: int) -> str:
    """The state that goes with an exit code that another rank reported."""
    by_code = {kind.exit_code: state for kind, state in STATES.items()} | {0: "done", STOPPED_EXIT_CODE: "stopped"}
    return by_code.get(exit_code, "crashed")


def read_status(path: Path) -> dict[str, Any] | None:
    """The file's fields; None if there is no such file."""
    return json.loads(path.read_text()) if path.exists() else None


def previous_status(path: Path) -> dict[str, Any] | None:
    """Of an earlier start. Raises ConfigError when the file is damaged: a run that is done must not begin anew without a word."""
    if not path.exists():
        return None
    remedy = "Delete it, and the run goes on from its last checkpoint; without one it starts over from step 0"
    try:
        status = json_object(path)
    except ConfigError as error:
        raise ConfigError(f"{error}. {remedy}") from error
    if not isinstance(status.get("state"), str) or not isinstance(status.get("step"), int):
        raise ConfigError(f"{path} is damaged: it has no state or no step. {remedy}")
    return status


class StatusFile:
    """Atomic updates of status.json. `state` is running, done, stopped, or how it failed: config, preflight, diverged, lost, stalled or
    crashed.

    `running` with nobody holding the directory's lock means: killed.
    """

    def __init__(self, path: Path):
        self.path = path
        self._lock = threading.Lock()  # the thread that watches the other ranks writes here too

    def begin(self, step: int, steps: int, checkpoint: int | None) -> None:
        """A new start, or one that goes on from its own checkpoint (its step): forget how the earlier one ended."""
        now = round(time.time(), 3)
        fields = {"state": "running", "exit_code": None, "step": step, "steps": steps, "message": "", "checkpoint": checkpoint}
        who = {"pid": os.getpid(), "hostname": socket.gethostname(), "launcher": launcher()}
        self._write(fields | who | {"started": now, "updated": now})

    def update(self, **fields: Any) -> None:
        """Change some fields."""
        with self._lock:
            current = read_status(self.path)
            if current is None:  # it was there: the run directory is gone
                raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(self.path))
            self._write(current | fields | {"updated": round(time.time(), 3)})

    def end(self, state: str, exit_code: int, message: str) -> None:
        """How the run ended. The first word stands: what follows an error on one rank is only its echo on the others."""
        with self._lock:
            current = read_status(self.path)
            if current is None or current["state"] != "running":
                return
            end = {"state": state, "exit_code": exit_code, "message": message, "updated": round(time.time(), 3)}
            self._write(current | end)

    def _write(self, fields: dict[str, Any]) -> None:
        replace_text(self.path, json.dumps(fields, indent=2) + "\n")
