"""logs/rank_N.log: what each rank has to say. Warnings of rank 0 go to the console too."""

from __future__ import annotations

import contextlib
import logging
import sys
from pathlib import Path

LOGGER = logging.getLogger("megaflow")


class _LogFile(logging.FileHandler):
    """A line that the disk does not take is lost, and nothing else: Python's own would print a traceback for each."""

    def handleError(self, record: logging.LogRecord) -> None:
        if not isinstance(sys.exception(), OSError):
            super().handleError(record)

    def close(self) -> None:
        with contextlib.suppress(OSError):
            super().close()


class RankLog:
    """Open until close(). Holds handlers of our own logger and of Python's warnings, not of the root logger: SGLang replaces those."""

    def __init__(self, path: Path, is_first: bool):
        to_file = _LogFile(path)
        to_file.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
        self._handlers: list[tuple[logging.Logger, logging.Handler]] = [(LOGGER, to_file), (logging.getLogger("py.warnings"), to_file)]
        if is_first:
            to_console = logging.StreamHandler(sys.stderr)
            to_console.setFormatter(logging.Formatter("%(levelname)s: %(message)s"))
            to_console.addFilter(lambda record: record.levelno == logging.WARNING)  # an error is printed once, by the command line
            self._handlers.append((LOGGER, to_console))
        for logger, handler in self._handlers:
            logger.addHandler(handler)
            logger.propagate = False
        LOGGER.setLevel(logging.INFO)
        logging.captureWarnings(True)

    def close(self) -> None:
        logging.captureWarnings(False)
        for logger, handler in self._handlers:
            logger.removeHandler(handler)
            logger.propagate = True
            handler.close()
