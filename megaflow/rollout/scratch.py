"""A folder for an engine's temporary files (SGLang's sockets), which it leaves behind when it is killed."""

from __future__ import annotations

import fcntl
import shutil
import tempfile
import weakref
from pathlib import Path

PREFIX = "megaflow-engine-"


class Scratch:
    """One engine's folder, held by a lock that the kernel drops with this process; `remove` it after the engine.

    Making one also removes those whose ranks are gone.
    """

    def __init__(self) -> None:
        for left in Path(tempfile.gettempdir()).glob(f"{PREFIX}*/.lock"):
            _remove_if_free(left)
        self.path = Path(tempfile.mkdtemp(prefix=PREFIX))
        self._lock = (self.path / ".lock").open("w")
        fcntl.lockf(self._lock, fcntl.LOCK_EX)
        self.remove = weakref.finalize(self, shutil.rmtree, self.path, True)  # at the end of this process too


def _remove_if_free(lock: Path) -> None:
    try:
        with lock.open("r+") as file:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(lock.parent, ignore_errors=True)
    except OSError:  # held by a living rank, another user's, or just removed by somebody else
        return
