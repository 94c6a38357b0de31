"""How ranks find out about each other's end: an error, a death, a stall. Ties the watchdog to the mesh and to status.json."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from megaflow.config.schema import Config
from megaflow.monitor.watchdog import Place, Watchdog
from megaflow.parallel.peers import PERIOD_S
from megaflow.trainer.status import StatusFile, state_of_exit_code
from megaflow.types import StalledError

TELL_S = 3.0  # the store between the ranks may not answer any more


@contextlib.contextmanager
def watched(cfg: Config, mesh: Any, directory: Path) -> Iterator[None]:
    """Collective. For the time of the block, of a program that keeps no status.json: reports of stalls go into `directory`."""
    watchdog = watch(cfg, mesh, directory, None)
    try:
        yield
    finally:
        if watchdog is not None:
            watchdog.let_it_end()
            watchdog.close()


def watch(cfg: Config, mesh: Any, directory: Path, status: StatusFile | None) -> Watchdog | None:
    """Collective. From now on, until it is closed; None when `watchdog` sets no limit. status: where the end is noted, if anywhere."""
    watchdogs: list[Watchdog] = []

    def note(code: int, message: str) -> None:
        if status is not None:
            status.end(state_of_exit_code(code), code, message)

    def kill_silent() -> None:
        for watchdog in watchdogs:
            watchdog.kill_silent()

    def note_end(message: str, code: int) -> None:
        note(code, message)
        kill_silent()

    def end(message: str) -> None:
        try:
            note(StalledError.exit_code, message)
            teller = threading.Thread(target=mesh.watch.report, args=(message, StalledError.exit_code), daemon=True)
            teller.start()
            teller.join(TELL_S)
            kill_silent()
            if mesh.world_size > 1:
                time.sleep(2 * PERIOD_S)  # else the others see a broken connection before they see why
        finally:
            mesh.watch.end(message, StalledError.exit_code)

    mesh.watch.on_peer_error = note_end
    if not any([cfg.watchdog.timeout_s, *cfg.watchdog.phases.values()]):
        return None
    places = mesh.all_gather(Place.own(mesh.rank))
    store = mesh.watch.store.clone() if mesh.world_size > 1 else None
    watchdogs.append(Watchdog(cfg, directory, places, mesh.rank, store, end))
    return watchdogs[0]
