"""A board in shared memory beside each rank: what the rank offers to readers, and what the engine worker beside it reports.

Whoever waits polls words here; no message and no collective is needed between the ranks that own weights and the workers that read them.
Loads are numbered from 1 on, alike on all ranks.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

from torch import Tensor

from megaflow.parallel.shared_memory import (
    ERROR_BYTES,
    ChannelError,
    EndLost,
    map_words,
    open_fd,
    read_error,
    read_text,
    require_process,
    wait_until,
    write_error,
    write_text,
)

# words: written by the rank
_OFFERED, _EPOCH = 0, 1
# words: written by the worker
_DONE, _FAILED, _COPY_US, _PROOF_US = 2, 3, 4, 5
# word: written by the rank that owns the worker's engine
_LOST = 6
_HEADER = 8


class Board:
    """One board, from either end. Make it with `create` in the rank, and with `attach` from its notice anywhere else on the host."""

    def __init__(self, notice: dict[str, Any], fd: int):
        self.notice = notice
        self.memory, self.words = map_words(fd, 8 * (_HEADER + notice["num_digests"]) + ERROR_BYTES)

    @classmethod
    def create(cls, num_digests: int) -> Board:
        names = ("board", "window", "plan")
        fds = {name: os.memfd_create(f"megaflow-{name}") for name in names}
        return cls({"pid": os.getpid(), "num_digests": num_digests, **fds}, fds["board"])

    @classmethod
    def attach(cls, notice: dict[str, Any]) -> Board:
        """notice: JSON, from `Board.notice` of the one that was created."""
        fd = open_fd(notice["pid"], notice["board"])
        board = cls(notice, fd)
        os.close(fd)  # the mapping stays
        return board

    # --- the rank's half ----------------------------------------------------------------------------------------------

    def write(self, sheet: str, text: str) -> None:
        """Sheets: `plan`, what the worker reads, once; `window`, where the rank's parameters lie, at each new epoch."""
        write_text(self.notice[sheet], text)

    def offer(self, load: int, epoch: int) -> None:
        """From now on until every reader has done load number `load`, this rank's window shows what is to be read."""
        self.words[_EPOCH] = epoch
        self.words[_OFFERED] = load

    def await_done(self, load: int, check: Callable[[], None], timeout_s: float, who: str) -> None:
        """The worker has copied everything. Raises ChannelError with the worker's error; EndLost when it is lost, or after timeout_s."""

        def failed_or_gone() -> None:
            if int(self.words[_FAILED]) == load:
                raise ChannelError(read_error(self.memory))
            if int(self.words[_LOST]) == load:
                raise EndLost(f"{who} is lost")
            check()

        wait_until(lambda: int(self.words[_DONE]) >= load, failed_or_gone, timeout_s, f"{who} to read its weights")

    def worker_lost(self, load: int) -> None:
        """Tell whoever waits for the worker that it will not come: its process is gone."""
        self.words[_LOST] = load

    @property
    def digests(self) -> Tensor:
        """[num_digests] int64, of the last load that was done."""
        return self.words[_HEADER : _HEADER + self.notice["num_digests"]]

    @property
    def milliseconds(self) -> tuple[float, float]:
        """Of the last load: the worker's copy, and its digests."""
        return int(self.words[_COPY_US]) / 1e3, int(self.words[_PROOF_US]) / 1e3

    # --- the worker's half --------------------------------------------------------------------------------------------

    def read(self, sheet: str) -> str:
        return read_text(self.notice["pid"], self.notice[sheet])

    def await_offer(self, load: int, timeout_s: float) -> int:
        """The epoch of the window. Raises EndLost when the rank is gone, or after timeout_s."""
        pid = self.notice["pid"]
        wait_until(lambda: int(self.words[_OFFERED]) >= load, lambda: require_process(pid), timeout_s, f"the trainer process {pid}")
        return int(self.words[_EPOCH])

    def done(self, load: int, digests: Tensor | None, copy_ms: float, proof_ms: float) -> None:
        if digests is not None:
            self.digests.copy_(digests)
        self.words[_COPY_US], self.words[_PROOF_US] = int(copy_ms * 1e3), int(proof_ms * 1e3)
        self.words[_DONE] = load

    def fail(self, load: int, message: str) -> None:
        """Tell the rank why the worker gives up."""
        write_error(self.memory, message)
        self.words[_FAILED] = load

