"""What this rank is doing right now, in one page of memory that others on its host can read, even if the rank is stopped.

One record a process, since there is one main thread; like logging, so that a verb deep in a library need not be handed anything to say
how far it is. A mark costs 0.4 us. The page is a memfd, reached through /proc/<pid>/fd: nothing is left behind by a killed process.
"""

from __future__ import annotations

import contextlib
import json
import mmap
import os
import secrets
import struct
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

SIZE = 8192
# token, number of marks, time of the last one, step, done, total, is it the phase's first time here, phase, item
_DOING = struct.Struct("<8sqqqqqq32s112s")
_BEAT = struct.Struct("<qi")  # time of the watching thread's last look, bytes of JSON that follow
_BEAT_AT = 1024


@dataclass(frozen=True)
class Doing:
    """phase and item: in words; done of total: items; marks: how many signs of progress so far; at_ns: monotonic clock of the last."""

    marks: int
    at_ns: int
    step: int
    phase: str
    item: str
    done: int
    total: int
    is_first: bool

    def age_s(self, now_ns: int) -> float:
        return max(0, now_ns - self.at_ns) / 1e9

    @property
    def text(self) -> str:
        count = f" {self.done} of {self.total}" if self.total else f" {self.done}" if self.done else ""
        return f"{self.item}{count}"


class Record:
    """Of this process, and its own affair until it is published; `open_peer` gives another one's."""

    def __init__(self, memory: mmap.mmap | bytearray):
        self.memory, self.fd, self.token = memory, -1, b""
        self.step, self.phase, self.is_first, self.marks = 0, "start", True, 0
        self._seen: set[str] = set()

    def publish(self) -> tuple[int, bytes]:
        """From now on others can read it -> (number of the memfd, token that proves that it is this one)."""
        if self.fd < 0:
            self.fd, self.token = os.memfd_create("megaflow-progress"), secrets.token_bytes(8)
            os.ftruncate(self.fd, SIZE)
            self.memory = mmap.mmap(self.fd, SIZE)
        self.mark("")
        return self.fd, self.token

    @classmethod
    def open_peer(cls, pid: int, fd: int, token: bytes) -> Record | None:
        """None when it cannot be read: another user, another PID namespace."""
        try:
            theirs = os.open(f"/proc/{pid}/fd/{fd}", os.O_RDONLY)
        except OSError:
            return None
        try:
            memory = mmap.mmap(theirs, SIZE, prot=mmap.PROT_READ)
        except (OSError, ValueError):  # another file, too short
            return None
        finally:
            os.close(theirs)
        return cls(memory) if memory[:8] == token else None

    # --- written by the main thread -----------------------------------------------------------------------------------

    def mark(self, item: str, done: int = 0, total: int = 0) -> None:
        """A sign of progress: `item` (number `done` of `total`) begins, or is done."""
        self.marks += 1
        place = (self.token, self.marks, time.monotonic_ns(), self.step, done, total, self.is_first)
        _DOING.pack_into(self.memory, 0, *place, self.phase.encode(), item.encode())

    def enter(self, phase: str, step: int) -> str:
        """A phase begins, or goes on after one within it. Returns the one before."""
        before, self.phase, self.step = self.phase, phase, step
        self.is_first = phase not in self._seen
        self.mark("")
        return before

    def leave(self, before: str) -> None:
        """The phase has ended, and its next time is not its first; back to `before`."""
        self._seen.add(self.phase)
        self.enter(before, self.step)

    # --- written by the thread that watches ---------------------------------------------------------------------------

    def beat(self, facts: dict[str, Any]) -> None:
        """The process runs Python. facts: what others may want to know should it not answer later."""
        text = json.dumps(facts).encode()
        if len(text) > SIZE - _BEAT_AT - _BEAT.size:
            text = b"{}"
        _BEAT.pack_into(self.memory, _BEAT_AT, time.monotonic_ns(), len(text))
        start = _BEAT_AT + _BEAT.size
        self.memory[start : start + len(text)] = text

    # --- read by anybody ----------------------------------------------------------------------------------------------

    def doing(self) -> Doing:
        size = _DOING.size
        first = self.memory[:size]
        while (second := self.memory[:size]) != first:  # written just now
            first = second
        _, marks, at_ns, step, done, total, is_first, phase, item = _DOING.unpack(first)
        words = [text.rstrip(b"\0").decode(errors="replace") for text in (phase, item)]
        return Doing(marks, at_ns, step, words[0], words[1], done, total, bool(is_first))

    def last_beat(self) -> tuple[int, dict[str, Any]]:
        """(monotonic clock of the host in ns, its facts); (0, {}) before the first."""
        at_ns, size = _BEAT.unpack_from(self.memory, _BEAT_AT)
        start = _BEAT_AT + _BEAT.size
        try:
            return at_ns, json.loads(self.memory[start : start + size] or b"{}")
        except ValueError:  # half written
            return at_ns, {}


RECORD = Record(bytearray(SIZE))
mark, enter, leave = RECORD.mark, RECORD.enter, RECORD.leave


@contextlib.contextmanager
def phase(name: str, step: int) -> Iterator[None]:
    """What runs in the block belongs to this phase, and to the one before again after it."""
    before = enter(name, step)
    try:
        yield
    finally:
        leave(before)
