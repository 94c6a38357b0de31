"""Run a program of tests/programs on several ranks and bring back what each rank reports."""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

import psutil

ROOT = Path(__file__).resolve().parent.parent
PROGRAMS = ROOT / "tests" / "programs"


def run_ranks(program: str, ranks: int, *arguments: str, timeout: float = 180.0, env: dict[str, str] | None = None) -> list[dict]:
    """Every rank's `report(...)`, by rank. Fails with the program's output when it fails or takes more than `timeout` seconds."""
    with tempfile.TemporaryDirectory() as reports:
        code, output = launch([str(PROGRAMS / f"{program}.py"), *arguments], ranks, timeout, {"REPORTS": reports, **(env or {})})
        assert code == 0, f"{program} on {ranks} ranks ended with {code}:\n{output[-6000:]}"
        return [json.loads((Path(reports) / f"{rank}.json").read_text()) for rank in range(ranks)]


def launch(command: list[str], ranks: int, timeout: float, env: dict[str, str] | None = None) -> tuple[int, str]:
    """torchrun (plain python for one rank) in a process group of its own that ends with it -> (exit code, output); code 124: timed out."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(ranks)]
    launcher += ["--master-addr", "127.0.0.1", "--master-port", str(free_port())]  # a host name may not resolve
    full = {**clean_env(), **(env or {})}
    process = subprocess.Popen(
        [*(launcher if ranks > 1 else [sys.executable]), *command],
        cwd=ROOT, env=full, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True,
    )  # fmt: skip
    try:
        output, _ = process.communicate(timeout=timeout)
        return process.returncode, output
    except subprocess.TimeoutExpired:
        for each in [*psutil.Process(process.pid).children(recursive=True), process]:  # also those in a group of their own
            with contextlib.suppress(psutil.NoSuchProcess):
                each.kill()
        output, _ = process.communicate()
        return 124, output
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # what a rank left behind


def free_port() -> int:
    """It and the next one are free, and below those that Linux hands out: a socket beside this test would take one of these in between."""
    while True:
        port = random.SystemRandom().randrange(20000, 32766, 2)  # not the seeded generator, which other workers have as well
        with contextlib.suppress(OSError), socket.socket() as first, socket.socket() as second:
            first.bind(("127.0.0.1", port))
            second.bind(("127.0.0.1", port + 1))
            return port


def clean_env() -> dict[str, str]:
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    kept = {k: v for k, v in os.environ.items() if k not in names and not k.startswith("TORCHELASTIC")}
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH", "")]))
    return {**kept, "OMP_NUM_THREADS": "1", "PYTHONPATH": path}


def report(**values) -> None:
    """For the program: what this rank has found (JSON values)."""
    Path(os.environ["REPORTS"], f"{os.environ.get('RANK', '0')}.json").write_text(json.dumps(values))
