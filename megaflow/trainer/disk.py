"""Writing to a disk that is full for a while, or gone: wait, then end in an orderly way. What was written before stays whole."""

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


def patiently(directory: Path, write: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """`write(*args, **kwargs)`, again until the disk takes it. `write` leaves nothing half done when it raises OSError.

    Raises LostError when `directory`, the run's, is gone, or after PATIENCE_S.
    """
    began = time.monotonic()
    while True:
        try:
            found = write(*args, **kwargs)
            break
        except OSError as error:
            waited = time.monotonic() - began
            if error.errno == errno.ENOENT and not directory.exists():
                raise LostError(f"the run directory {directory} is gone: deleted, or its file system is not there any more") from error
            if error.errno not in PASSING:
                raise
            if waited > PATIENCE_S:
                raise LostError(
                    f"{directory}: {error.strerror} for {waited:.0f} s. The last checkpoint is untouched: make room, then start the same "
                    "command again"
                ) from error
            if waited < PERIOD_S:
                LOGGER.warning("%s: %s; the run waits for it to pass, up to %.0f s", directory, error.strerror, PATIENCE_S)
            progress.mark("waiting for the disk")
            time.sleep(PERIOD_S)
    if (waited := time.monotonic() - began) >= PERIOD_S:
        LOGGER.warning("%s can be written again after %.0f s", directory, waited)
    return found
