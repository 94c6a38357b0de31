"""torchrun --max-restarts starts all ranks again when one has failed. The run must know its own second life from somebody else's first."""

from __future__ import annotations

import os
import socket
from typing import Any

import psutil

from megaflow.types import DivergedError, UserError

ENDED = ("done", "stopped", "config", "preflight", "diverged")  # another start would end in the same way, or go on against the user's wish


def launcher() -> str:
    """What started this rank, the same for all its restarts: torchrun's run id, or where its process is; "" without torchrun."""
    if "TORCHELASTIC_RESTART_COUNT" not in os.environ:
        return ""
    run_id = os.environ.get("TORCHELASTIC_RUN_ID", "none")
    if run_id != "none":
        return run_id
    parent = psutil.Process(os.getppid())
    return f"{socket.gethostname()} {parent.pid} {parent.create_time():.2f}"


def is_restart(status: dict[str, Any] | None) -> bool:
    """Whether this launcher has started the run of this status.json before.

    Raises UserError with the run's exit code if the run has come to its end: torchrun takes every code but 0 for a failure.
    """
    if int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")) == 0 or status is None or status.get("launcher") != launcher():
        return False
    if status["state"] in ENDED:
        error = (DivergedError if status["state"] == "diverged" else UserError)(f"not started again: {status['message'] or 'it is done'}")
        error.exit_code = status["exit_code"]
        raise error
    return True
