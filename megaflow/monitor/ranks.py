"""The other ranks as one rank sees them: those on its host through their memory, those on other hosts as they have told."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import time
from dataclasses import asdict, dataclass
from typing import Any

from megaflow.monitor import progress
from megaflow.monitor.courier import Courier
from megaflow.monitor.limits import Limits


@dataclass(frozen=True)
class Place:
    """Where a rank's record lies. token: hex."""

    rank: int
    host: str
    pid: int
    fd: int
    token: str

    @classmethod
    def own(cls, rank: int) -> Place:
        fd, token = progress.RECORD.publish()
        return cls(rank, socket.gethostname(), os.getpid(), fd, token.hex())


@dataclass
class Sight:
    """What is known of a rank at this moment. beat_s: seconds since it was seen to run Python; 0 once it answers a stall."""

    doing: progress.Doing
    age_s: float
    beat_s: float
    waiting: bool
    counts: dict[str, list[int]]

    def to_tell(self) -> dict[str, Any]:
        """For ranks on other hosts (JSON), in another way each time."""
        return {"doing": asdict(self.doing), "age_s": self.age_s, "waiting": self.waiting, "counts": self.counts, "at": time.time()}


class Peer:
    """Another rank. On this host its memory and its process can be reached."""

    def __init__(self, place: Place):
        self.place, self.record, self.process = place, None, -1
        if place.host == socket.gethostname():
            self.record = progress.Record.open_peer(place.pid, place.fd, bytes.fromhex(place.token))
        if self.record is not None:
            self.process = os.pidfd_open(place.pid)  # this very process, whoever has its number later

    @property
    def is_here(self) -> bool:
        return self.record is not None

    def sight(self, told: tuple[dict[str, Any], float] | None) -> Sight | None:
        """told: see Courier. None when nothing is known."""
        now = time.monotonic_ns()
        if self.record is not None:
            doing, (beat_ns, facts) = self.record.doing(), self.record.last_beat()
            beat_s = 0.0 if facts.get("answers") else (now - beat_ns) / 1e9
            return Sight(doing, doing.age_s(now), beat_s, facts.get("waiting", False), facts.get("counts", {}))
        if told is None:
            return None
        facts, heard = told
        since = now / 1e9 - heard
        return Sight(progress.Doing(**facts["doing"]), facts["age_s"] + since, since, facts["waiting"], facts["counts"])

    def kill(self) -> None:
        if self.process >= 0:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self.process, signal.SIGKILL)


class Ranks:
    """All ranks but this one."""

    def __init__(self, places: list[Place], rank: int, limits: Limits, courier: Courier | None):
        self.peers = {p.rank: Peer(p) for p in places if p.rank != rank}
        self.rank, self.courier, self.limits = rank, courier, limits
        self.some_are_far = any(not peer.is_here for peer in self.peers.values())
        self._silent_s = max(1.0, 4 * limits.period_s)
        self._far_silent_s = self._silent_s + 3 * limits.tell_s

    def sights(self) -> dict[int, Sight | None]:
        told = self.courier.told if self.courier is not None else {}
        return {rank: peer.sight(told.get(rank)) for rank, peer in self.peers.items()}

    def is_silent(self, rank: int, sight: Sight | None) -> bool:
        """It runs no Python: stopped, or its GIL is held, or its host is gone."""
        return sight is None or sight.beat_s > (self._silent_s if self.peers[rank].is_here else self._far_silent_s)

    def silent(self) -> set[int]:
        return {rank for rank, sight in self.sights().items() if self.is_silent(rank, sight)}

    def silent_here(self) -> set[int]:
        return {rank for rank in self.silent() if self.peers[rank].is_here}

    @property
    def is_speaker(self) -> bool:
        """This rank is the lowest of its host that is not silent, and speaks for those that are."""
        return self.rank == min([self.rank, *({r for r, p in self.peers.items() if p.is_here} - self.silent())])

    def are_stalled(self, me: Sight) -> bool:
        """As this rank sees it. It works, and is past its limit. Or it waits past its limit, and all others are past theirs, or one is and
        works or is silent. Or it waits in a collective that would soon fail by itself.
        """
        limit_s = self.limits.of(me.doing)
        if not me.waiting or not self.peers or me.age_s <= limit_s:
            return me.age_s > (min(limit_s, self.limits.collective_s) if me.waiting else limit_s)
        sights, silent = self.sights(), self.silent()
        late = {r: s is None or s.age_s > self._limit_s(r, s, r in silent, limit_s) for r, s in sights.items()}
        held_up = all(late.values()) or any(late[r] and s is not None and (not s.waiting or r in silent) for r, s in sights.items())
        return held_up or me.age_s > self.limits.collective_s

    def _limit_s(self, rank: int, sight: Sight, is_silent: bool, own_limit_s: float) -> float:
        """What phase a host that fell silent has come to is not known: its limit is taken to be this rank's."""
        return own_limit_s if is_silent and not self.peers[rank].is_here else self.limits.of(sight.doing)
