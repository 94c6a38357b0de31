"""How ranks find out about each other's end: an error, a death, a stall. Ties the watchdog to the mesh and to status.json."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

from megaflow.config.schema import Config
from megaflow.monitor.watchdog import Place, Watchdog
from megaflow.parallel.peers import PERIOD_S
from megaflow.trainer.status import StatusFile, state_of_exit_code
from megaflow.types import StalledError

TELL_S = 3.0  # the store between the ranks may not answer any more


def watch(cfg: Config, mesh: Any, directory: Path, status: StatusFile) -> Watchdog | None:
    """Collective. From now on, until it is closed; None when `watchdog` sets no limit."""
    watchdogs: list[Watchdog] = []

    def kill_silent() -> None:
        for watchdog in watchdogs:
            watchdog.kill_silent()

    def note_end(message: str, code: int) -> None:
        status.end(state_of_exit_code(code), code, message)
        kill_silent()

    def end(message: str) -> None:
        try:
            status.end(state_of_exit_code(StalledError.exit_code), StalledError.exit_code, message)
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
