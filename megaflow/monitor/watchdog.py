"""Ends a run that does not move any more, and says who waits for whom. A thread on each rank that looks at the rank's own record.

A rank that waits in a collective is only as stalled as those it waits for, so it looks at their records too: in memory on its host, through
the store between hosts. So a rank that is stopped, that holds the GIL for ever or whose host is gone is found by the others. A process
alone that holds the GIL is ended by faulthandler's own timer, with its stacks on stderr and exit code 1.
"""

from __future__ import annotations

import faulthandler
import json
import logging
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch.distributed as dist

from megaflow.background import background
from megaflow.config.schema import Config
from megaflow.monitor import collectives, evidence, progress, stacks
from megaflow.monitor.courier import Courier
from megaflow.monitor.limits import Limits
from megaflow.monitor.ranks import Place, Ranks, Sight
from megaflow.monitor.stall import Finding, conclusion, report

ANSWER_S = 10.0  # for the other ranks to say what they do, and for their engines' stacks
NEIGHBOURS_S = 3.0  # for others to speak for ranks that are silent
LAST_S = 15.0  # then a rank that was not ended ends itself
log = logging.getLogger("megaflow")


class Watchdog:
    """Watches from the moment it is made until `close`. `end(message)` must end this process and tell the other ranks."""

    def __init__(self, cfg: Config, directory: Path, places: list[Place], rank: int, store: dist.Store | None, end: Callable[[str], None]):
        """places: of all ranks, in their order; store: between the ranks (None: there is one)."""
        self.limits, self.directory, self.place, self.end = Limits(cfg), directory, places[rank], end
        self.courier = Courier(store, rank, len(places), self.limits.period_s, self.limits.tell_s) if store is not None else None
        self.ranks = Ranks(places, rank, self.limits, self.courier)
        self.record = progress.RECORD
        self._closed, self._is_ending = threading.Event(), False
        self._found_silent: set[int] = set()
        self._faults: set[str] = set()  # said once
        self._armed_at = 0.0
        stacks.install()
        self.record.mark("")
        self._beat()
        self._arm()
        background(self._watch, "watchdog", self._closed.set)

    def close(self) -> None:
        self._closed.set()
        faulthandler.cancel_dump_traceback_later()
        if self.courier is not None:
            self.courier.close()

    def let_it_end(self) -> None:
        """For the main thread, when it can go on or meets an error: if a stall is being reported, the process ends with that."""
        if self._is_ending:
            time.sleep(ANSWER_S + LAST_S)

    def kill_silent(self) -> None:
        """After the others know how the run ends: the processes on this host that cannot end themselves. Their children end with them."""
        for rank in self._found_silent:
            self.ranks.peers[rank].kill()

    # --- looking --------------------------------------------------------------------------------------------------------

    def _watch(self) -> None:
        while not self._closed.wait(self.limits.period_s):
            try:
                self._look()
            except Exception as error:  # a fault of the watch must not go unseen, nor end a run that is well
                if repr(error) not in self._faults:
                    self._faults.add(repr(error))
                    log.exception("the watchdog failed and goes on")

    def _look(self) -> None:
        me = self._beat()
        self._arm()
        if self.courier is not None and self.courier.stall is not None:
            self._respond(self.courier.stall)
        elif self._has_stalled(me) and not self._closed.is_set():
            self._announce()

    def _beat(self) -> Sight:
        """Say that this process runs Python, and what its groups wait for."""
        counts, doing = collectives.counts(), self.record.doing()
        age_s = doing.age_s(time.monotonic_ns())
        waiting = any(begun > done for begun, done in counts.values())
        if waiting and age_s > self.limits.of(doing) / 2:  # the counts can miss an end; the list does not, but costs 30 ms
            waiting = bool(collectives.begun())
        waiting = waiting or bool(evidence.call_of_main_thread())
        self.record.beat({"waiting": waiting, "counts": counts, "answers": self._is_ending})
        sight = Sight(doing, age_s, 0.0, waiting, counts)
        if self.courier is not None and self.ranks.some_are_far:
            self.courier.telling = sight.to_tell()
        return sight

    def _arm(self) -> None:
        """faulthandler's timer runs in C. It goes off only if this thread could not run for longer than any stall may take."""
        now = time.monotonic()
        if now - self._armed_at > self.limits.backstop_s / 10:
            self._armed_at = now
            faulthandler.dump_traceback_later(self.limits.backstop_s, exit=True, file=sys.__stderr__)

    def _has_stalled(self, me: Sight) -> bool:
        if self.courier is not None:  # early, to see for how long a host has told nothing
            limit_s = min(self.limits.of(me.doing), self.limits.collective_s)
            self.courier.wants_told = me.waiting and me.age_s > limit_s / 4 and self.ranks.some_are_far
        return self.ranks.are_stalled(me)

    # --- a stall --------------------------------------------------------------------------------------------------------

    def _announce(self) -> None:
        stall = {"by": self.place.rank, "folder": str(self.directory / time.strftime("stall-%Y%m%d-%H%M%S"))}
        try:
            if self.courier is not None:
                stall = self.courier.announce(stall)
        except TimeoutError:  # the store's host is the one that stands still; the speaker of each host reports for it
            stall |= {"by": self.place.rank if self.ranks.is_speaker else -1, "folder": f"{stall['folder']}-{socket.gethostname()}"}
        self._respond(stall)

    def _respond(self, stall: dict[str, Any]) -> None:
        """Every rank writes down what it does; the first one that noticed gathers it, prints it and ends the run."""
        message, self._is_ending = f"the run has stalled; {stall['folder']}/", True
        try:
            folder = _writable(Path(stall["folder"]))
            findings = self._findings(folder)
            if stall["by"] == self.place.rank:
                message = self._report(folder, findings)
            else:
                self._answer(findings)
                time.sleep(LAST_S)
        except Exception:  # the process ends in any case
            log.exception("the report of a stall failed")
        finally:
            self._closed.set()
            self.end(message)

    def _findings(self, folder: Path) -> list[Finding]:
        """Of this rank; and of the silent ones on its host, if it speaks for them."""
        mine = evidence.of_this_rank(self.place, self._beat(), self.limits, folder)
        others = self.ranks.silent_here() if self.ranks.is_speaker else ()
        return [mine, *(self._find_out(rank, folder) for rank in others)]

    def _find_out(self, rank: int, folder: Path) -> Finding:
        sight = self.ranks.sights()[rank]
        is_silent = self.ranks.is_silent(rank, sight)
        if is_silent:
            self._found_silent.add(rank)
        return evidence.of_another(self.ranks.peers[rank], sight, is_silent, self.limits, folder)

    def _answer(self, findings: list[Finding]) -> None:
        try:
            self.courier.put(f"finding{self.place.rank}", [asdict(f) for f in findings])
        except TimeoutError:
            log.warning("the store between the ranks does not answer; files of this rank are written")

    def _report(self, folder: Path, findings: list[Finding]) -> str:
        by_rank = {f.rank: f for f in findings}
        self._gather_answers(by_rank)
        for rank in self.ranks.peers.keys() - by_rank.keys():
            by_rank[rank] = self._find_out(rank, folder)
        everyone = [by_rank[rank] for rank in sorted(by_rank)]
        text = report(everyone, str(folder))
        (folder / "report.txt").write_text(text + "\n")
        (folder / "findings.json").write_text(json.dumps([asdict(f) for f in everyone], indent=1))
        print(f"[rank {self.place.rank}] {text}", file=sys.stderr, flush=True)
        return f"stalled: {conclusion(everyone)}; see {folder}/report.txt"

    def _gather_answers(self, found: dict[int, Finding]) -> None:
        """What the other ranks say, of themselves and of their silent neighbours."""
        began = time.monotonic()
        while self.courier is not None and (waited := time.monotonic() - began) < ANSWER_S:
            missing = self.ranks.peers.keys() - found.keys()
            if not missing or (waited > NEIGHBOURS_S and missing <= self.ranks.silent()):
                return
            try:
                answers = self.courier.fetch([f"finding{rank}" for rank in missing])
            except TimeoutError:
                return
            for answer in answers.values():
                found.update({finding["rank"]: Finding(**finding) for finding in answer})
            time.sleep(0.1)


def _writable(folder: Path) -> Path:
    """That folder, or one for temporary files if the run directory is what went away."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        log.warning("%s: %s", folder, error)
        return Path(tempfile.mkdtemp(prefix="megaflow-stall-"))
    return folder
