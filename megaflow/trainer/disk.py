"""Writing to a disk that is full or away for a while, or gone: wait, then end in an orderly way. What was written before stays whole."""

from __future__ import annotations

import errno
import time
from collections.abc import Callable
from pathlib import Path
from typing import ParamSpec, TypeVar

from megaflow.monitor import progress
from megaflow.trainer.logs import LOGGER
from megaflow.types import LostError

PATIENCE_S = 600.0
PERIOD_S = 1.0
# Full, over the quota, over a limit; input/output error, stale handle, not connected, read only: a network file system that is away.
PASSING = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.ESTALE, errno.ENOTCONN, errno.ETIMEDOUT, errno.EROFS}
P, T = ParamSpec("P"), TypeVar("T")


class RunDisk:
    """The run directory and the file system that it is on. Made when the directory is: `sign` is a file in it that always is there."""

    def __init__(self, directory: Path, sign: str):
        self.directory, self._sign = directory, directory / sign
        self._device = directory.stat().st_dev

    def is_there(self) -> bool:
        return self._sign.exists()

    def is_deleted(self) -> bool:
        """It is not there, and what is there is on the same file system, which therefore is."""
        if self.is_there():
            return False
        nearest = next(path for path in (self.directory, *self.directory.absolute().parents) if path.exists())
        return nearest.stat().st_dev == self._device

    def patiently(self, write: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """`write(*args, **kwargs)`, again until the disk takes it. `write` leaves nothing half done when it raises OSError.

        Raises LostError when the directory is deleted, or after PATIENCE_S.
        """
        began = time.monotonic()
        while True:
            try:
                if not self.is_there():  # what lies under a mount point would take it
                    raise FileNotFoundError(errno.ENOENT, "the file system is not there", str(self.directory))
                found = write(*args, **kwargs)
                break
            except OSError as error:
                self._wait(error, time.monotonic() - began)
        if (waited := time.monotonic() - began) >= PERIOD_S:
            LOGGER.warning("%s can be written again after %.0f s", self.directory, waited)
        return found

    def _wait(self, error: OSError, waited: float) -> None:
        if self.is_deleted():
            raise gone(self.directory) from error
        if error.errno not in PASSING and self.is_there():
            raise error
        if waited > PATIENCE_S:
            raise LostError(
                f"{self.directory}: {error.strerror} for {waited:.0f} s. The last checkpoint is untouched: {_remedy(error)}, "
                "then start the same command again"
            ) from error
        if waited < PERIOD_S:
            LOGGER.warning("%s: %s; the run waits for it to pass, up to %.0f s", self.directory, error.strerror, PATIENCE_S)
        progress.mark("waiting for the disk")
        time.sleep(PERIOD_S)


def gone(directory: Path) -> LostError:
    return LostError(f"the run directory {directory} is gone: deleted, or its file system is not there any more")


def _remedy(error: OSError) -> str:
    return "make room" if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG) else "bring its file system back"
