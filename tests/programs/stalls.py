"""Ranks that stall: ROOT. Many jobs at once, forked from one process, with the real mesh, Run and watchdog.

In each phase of a step one rank goes into `stuck_in_<phase>` while the other waits for it; then the other ways to stall. ROOT/<job>/ is the
job's run directory, ROOT/<job>.log its output, ROOT/<job>.json [exit code, seconds] by rank.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import re
import signal
import socket
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist

import megaflow.actor.actor  # noqa: F401  what Mesh.create would import, before the forks
from megaflow.config.schema import Config, MonitorConfig, RunConfig, WatchdogConfig
from megaflow.monitor.limits import Limits
from megaflow.monitor.progress import mark
from megaflow.parallel.mesh import Mesh
from megaflow.trainer.run import Run
from tests.programs.forked import start

LIMIT_S = 2.0
PHASES = ("sync", "rollout", "reward", "logprob", "logic", "update", "eval", "save")
StepOf = Callable[[Run, Mesh, int], None]


def run_job(root: Path, name: str, step_of: StepOf) -> None:
    """One rank of a job of three steps."""
    log = os.open(root / f"{name}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(log, 1)
    os.dup2(log, 2)
    if name.startswith("far"):  # as if each rank were on a host of its own
        socket.gethostname = lambda host=f"host{os.environ['RANK']}": host
    if name == "alone_gil":
        Limits.backstop_s = 2 * LIMIT_S
    watchdog = WatchdogConfig(timeout_s=30.0, first_factor=1.0, phases=dict.fromkeys(PHASES, LIMIT_S))
    run_config = RunConfig(name=name, root=str(root), steps=3, timeout_s=60)
    cfg = Config(run=run_config, monitor=MonitorConfig(plot=False), watchdog=watchdog)
    mesh = Mesh.create(cfg.parallel, 1, cfg.run.timeout_s)
    with Run.open(cfg, mesh, lambda path: None) as run:
        for step in run.steps():
            step_of(run, mesh, step)
            run.log(step, {"reward/mean": 0.0})
        run.finish()
    mesh.close()


def stalls_in(phase: str) -> StepOf:
    """All phases of a step, each with a collective at its end; in the second step rank 1 (in a reward or the logic: rank 0) is stuck."""
    culprit = 0 if phase in ("reward", "logic") else 1
    stuck: dict = {}
    exec(f"def stuck_in_{phase}():\n    import time\n    time.sleep(300)", stuck)

    def step_of(run: Run, mesh: Mesh, step: int) -> None:
        for name in PHASES:
            with run.phase(name):
                if name == phase and step == 2 and mesh.rank == culprit:
                    mark("item", 3, 8)
                    stuck[f"stuck_in_{phase}"]()
                mesh.barrier()

    return step_of


def moves_slowly(run: Run, mesh: Mesh, step: int) -> None:
    """In the second step rank 1 takes twice the limit, with signs of progress; rank 0 waits for it all the time."""
    with run.phase("reward"):
        for i in range(10 if mesh.rank == 1 and step == 2 else 0):
            time.sleep(LIMIT_S / 5)
            mark("reward", i + 1, 10)
        mesh.barrier()


def stops(rank: int) -> StepOf:
    def step_of(run: Run, mesh: Mesh, step: int) -> None:
        with run.phase("update"):
            mark("micro-batch", step, 3)
            if mesh.rank == rank and step == 2:
                stop_oneself()
            dist.all_reduce(torch.zeros(4), group=mesh.dp.group)

    return step_of


def stop_oneself() -> None:
    time.sleep(LIMIT_S / 2)  # so that the other host has been told of this rank
    os.kill(os.getpid(), signal.SIGSTOP)
    time.sleep(300)


def holds_the_gil(run: Run, mesh: Mesh, step: int) -> None:
    """No Python thread of the last rank runs any more."""
    with run.phase("update"):
        if mesh.rank == mesh.world_size - 1 and step == 2:
            match_for_ever()
        mesh.barrier()


def match_for_ever() -> None:
    re.match("(a+)+$", "a" * 60 + "b")


def crosses(run: Run, mesh: Mesh, step: int) -> None:
    """Each rank is in a collective that the other has not come to."""
    with run.phase("update"):
        dist.barrier(mesh.host_group if mesh.rank == 0 or step < 2 else mesh.dp.group)


def sleeps_alone(run: Run, mesh: Mesh, step: int) -> None:
    with run.phase("update"):
        time.sleep(300)


JOBS: dict[str, tuple[int, StepOf]] = {  # ranks, what a step does
    **{phase: (2, stalls_in(phase)) for phase in PHASES},
    "moving": (2, moves_slowly),
    "stopped1": (2, stops(1)),
    "stopped0": (2, stops(0)),  # and with it the store between the ranks
    "gil": (2, holds_the_gil),
    "crossed": (2, crosses),
    "far": (2, stalls_in("update")),
    "far_gone": (2, stops(1)),
    "alone": (1, sleeps_alone),
    "alone_gil": (1, holds_the_gil),
}


def free_ports(number: int) -> list[int]:
    """Each with the one after it free, since a job listens at both; below those that the system gives to connections meanwhile."""
    found: list[int] = []
    for port in random.sample(range(20_000, 32_000, 2), 1000):
        with contextlib.suppress(OSError), socket.socket() as first, socket.socket() as second:
            first.bind(("127.0.0.1", port))
            second.bind(("127.0.0.1", port + 1))
            found.append(port)
            if len(found) == number:
                break
    return found


def main() -> None:
    root = Path(sys.argv[1])
    began = time.monotonic()
    living: dict[int, tuple[str, int]] = {}  # pid -> job, rank
    for (name, (ranks, step_of)), port in zip(JOBS.items(), free_ports(len(JOBS)), strict=True):
        for rank, pid in enumerate(start(ranks, lambda job=name, what=step_of: run_job(root, job, what), port)):
            living[pid] = (name, rank)
    ends: dict[str, dict[str, list[float]]] = {}
    while living:
        pid, status = os.wait()
        name, rank = living.pop(pid)
        ends.setdefault(name, {})[str(rank)] = [os.waitstatus_to_exitcode(status), round(time.monotonic() - began, 2)]
        (root / f"{name}.json").write_text(json.dumps(ends[name]))
        if name == "far_gone" and rank == 0:  # nobody could reach the process of a host that is gone
            os.kill(next(p for p, (job, _) in living.items() if job == name), signal.SIGKILL)


if __name__ == "__main__":
    main()
