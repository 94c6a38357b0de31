"""The files of launch/slurm under a real Slurm: two tasks train, the time limit puts the job back into the queue, cancelling saves.

`make slurm` installs what it needs (Debian's slurm-wlm and munge).
"""

from __future__ import annotations

import os
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import pytest

from tests.e2e.program import last_step, metrics, status, write_config
from tests.e2e.slurm_cluster import SlurmCluster, missing
from tools.make_tiny_model import make

pytestmark = [pytest.mark.timeout(300), pytest.mark.skipif(bool(missing()), reason=f"lacks {', '.join(missing())}")]
SMALL = ("--ntasks-per-node=2", "--cpus-per-task=1", "--gpus-per-node=0")


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("made")
    make(folder / "model", data=folder / "data")
    return folder


@pytest.fixture(scope="module")
def slurm() -> Iterator[SlurmCluster]:
    with tempfile.TemporaryDirectory(prefix="slurm") as base, SlurmCluster(Path(base)) as cluster:
        cluster.env["PYTHON"] = sys.executable
        yield cluster


def submit(slurm: SlurmCluster, out: Path, file: str, *words: str) -> str:
    options = [w for w in words if w.startswith("--") and w != "--config"]
    arguments = [w for w in words if w not in options]
    slurm.env["LOGS"] = str(out / "logs")
    return slurm.submit(*SMALL, f"--output={out}/job-%a.out", *options, f"launch/slurm/{file}.sbatch", *arguments)


def test_requeued_before_the_time_limit_and_done_after_it(slurm, made, tmp_path) -> None:
    """USR1 two minutes before the time limit: the run must save, come back by itself, and have every step once."""
    config = write_config(tmp_path / "limit.yaml", made, run={"steps": 4000, "save_every": 0})
    directory = tmp_path / "runs" / "limit"
    job = submit(slurm, tmp_path, "grpo_single_node", "--time=00:20:00", "--signal=B:USR1@110", "--config", config)
    slurm.wait_for(job, "RUNNING", 20)
    began = time.monotonic()
    wait_until(lambda: last_step(directory) > 0, 120)  # however long a busy machine takes to start
    minutes = int((time.monotonic() - began) // 60) + 2
    slurm.call("scontrol", "update", f"JobId={job}", f"TimeLimit={minutes}")
    slurm.wait_for(job, "PENDING", 60 * minutes - (time.monotonic() - began))  # later, the limit itself would have ended it
    stopped_at = last_step(directory)
    assert stopped_at > 0 and status(directory)["state"] == "stopped" and status(directory)["checkpoint"] == stopped_at
    slurm.call("scontrol", "update", f"JobId={job}", "TimeLimit=20")
    slurm.wait_for(job, "RUNNING", 60)
    wait_until(lambda: last_step(directory) > stopped_at, 120)

    slurm.call("scancel", job)  # TERM to the tasks: the run saves and stops, and nobody puts it back
    assert slurm.wait_for(job, "CANCELLED", 40)["Restarts"] == "1"
    wait_until(lambda: status(directory)["state"] == "stopped", 20)
    assert [m["step"] for m in metrics(directory)] == list(range(last_step(directory) + 1))
    log = (tmp_path / "logs").glob("*.log")
    assert f"resuming from {directory}/checkpoints/step_{stopped_at:06d}" in "".join(p.read_text() for p in log)


STANDS_IN = """#!/bin/bash
if [ "$1" = tools/doctor.py ]; then echo "$(hostname) the same everywhere"; exit; fi
env -u OMP_NUM_THREADS nproc > {out}/cpus
trap 'exit 4' TERM
while :; do sleep 0.1; done
"""


@pytest.mark.parametrize("file", ["grpo_single_node", "grpo_multinode"])
def test_a_task_has_the_cpus_that_the_job_asks_for_and_a_run_that_fails_near_the_limit_is_not_put_back(slurm, tmp_path, file) -> None:
    """In the interpreter's place a program that ends with code 4 when it is asked to stop."""
    program, cpus = tmp_path / "python", min(2, os.cpu_count() or 1)
    program.write_text(STANDS_IN.format(out=tmp_path))
    program.chmod(0o755)
    with mock.patch.dict(slurm.env, PYTHON=str(program), SLURM_CPU_BIND="cores"):  # as most clusters do
        job = submit(slurm, tmp_path, file, "--nodes=1", "--ntasks-per-node=1", f"--cpus-per-task={cpus}")
    wait_until(lambda: (tmp_path / "cpus").exists() and (tmp_path / "cpus").read_text(), 60)
    assert int((tmp_path / "cpus").read_text()) == cpus
    slurm.call("scancel", "--batch", "--signal=USR1", job)  # as Slurm does before the time limit
    found = slurm.wait_for(job, "FAILED", 30)
    assert (found["ExitCode"], found["Restarts"]) == ("4:0", "0")


def test_sweep_runs_each_line_and_a_failure_keeps_its_exit_code(slurm, made, tmp_path) -> None:
    config = write_config(tmp_path / "sweep.yaml", made, run={"steps": 1, "save_final": False})
    lines = tmp_path / "lines.txt"
    lines.write_text("actor.lr=1e-4 run.name=low 'monitor.trackers=[]'\nactor.lr=1e-3 parallel.tp=3\n")
    job = submit(slurm, tmp_path, "sweep", "--array=1-2", str(lines), "--config", config)
    slurm.wait_for(f"{job}_1", "COMPLETED", 90)
    assert status(tmp_path / "runs" / "low")["state"] == "done"
    assert slurm.wait_for(f"{job}_2", "FAILED", 90)["ExitCode"] == "2:0"
    assert "parallel.tp=3" in "".join(p.read_text() for p in (tmp_path / "logs").glob("*.log"))


def wait_until(condition, timeout: float) -> None:
    deadline = time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.2)
