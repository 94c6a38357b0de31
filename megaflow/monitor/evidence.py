"""What a rank writes down when the run has stalled: of itself, of its engines, and of ranks on its host that do not answer."""

from __future__ import annotations

import json
import sys
import threading
import traceback
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from typing import Any

import psutil

from megaflow.monitor import collectives, stacks
from megaflow.monitor.limits import Limits
from megaflow.monitor.ranks import Peer, Place, Sight
from megaflow.monitor.stall import Finding

MAIN = threading.main_thread().ident


def call_of_main_thread() -> str:
    """The collective that it is inside of, as collectives.call_in says it."""
    return collectives.call_in(sys._current_frames().get(MAIN))


def of_this_rank(place: Place, sight: Sight, limits: Limits, folder: Path) -> Finding:
    """Also rankN.txt, with the stacks of all threads and of this rank's engines, and the flight recorder's content."""
    main = "".join(traceback.format_stack(sys._current_frames().get(MAIN)))
    finding = Finding(**_said(place, sight, limits), begun=collectives.begun(), call=call_of_main_thread(), stack=main)
    facts = json.dumps(asdict(finding) | {"stack": ""}, indent=1)
    path = folder / f"rank{place.rank}.txt"
    path.write_text(f"{finding.place}: {finding.doing}\n{facts}\n\nmain thread:\n{main}\nall threads:\n")
    stacks.own(path)
    collectives.save(folder / f"rank{place.rank}.flight_recorder.pickle")
    _write_children(path, place.pid)
    return finding


def of_another(peer: Peer, sight: Sight | None, is_silent: bool, limits: Limits, folder: Path) -> Finding:
    """Its record, its process, and its stack if its process can still be made to write it. A stopped one goes on until it is killed."""
    place = peer.place
    if sight is None or not peer.is_here:
        known = {"rank": place.rank, "host": place.host, "pid": place.pid} if sight is None else _said(place, sight, limits)
        return Finding(**known | {"waiting": False, "state": "its host does not answer"})
    state = stacks.state(place.pid)
    seen = stacks.by_py_spy(place.pid)
    whole = stacks.of_process(place.pid, wake=state.startswith("T"))
    finding = Finding(**_said(place, sight, limits), stack=stacks.main_thread(whole) or seen)
    if is_silent:  # else it lives, and only the store does not bring its answer
        finding.state, finding.waiting = state, False
    path = folder / f"rank{place.rank}.txt"
    path.write_text(f"{finding.place}: {finding.doing}\n\n{whole}\n{seen}")
    _write_children(path, place.pid)
    return finding


def _said(place: Place, sight: Sight, limits: Limits) -> dict[str, Any]:
    doing = sight.doing
    named = {"rank": place.rank, "host": place.host, "pid": place.pid, "step": doing.step, "phase": doing.phase, "item": doing.text}
    return named | {"age_s": sight.age_s, "limit_s": limits.of(doing), "waiting": sight.waiting, "counts": sight.counts}


def _write_children(path: Path, pid: int) -> None:
    """Engines and reward workers of a rank, as far as they can be looked into."""
    try:
        children = psutil.Process(pid).children(recursive=True)
    except psutil.NoSuchProcess:
        return
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(_child, children))
    with path.open("a") as file:
        file.writelines(found)


def _child(child: psutil.Process) -> str:
    try:
        command = " ".join(child.cmdline())[:120].strip()
    except psutil.Error:
        return f"\n=== process {child.pid} is gone ===\n"
    head = f"\n=== process {child.pid} {command}: {stacks.state(child.pid)} ===\n"
    return head + stacks.by_py_spy(child.pid) + stacks.of_process(child.pid)
