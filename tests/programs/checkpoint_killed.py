"""Runs that save in the background after every step, one undisturbed, one killed again and again: MODEL DIRECTORY KILLS.

Each start is a fork. It goes on from the newest whole checkpoint and draws the moment of its own death: some tensor that a thread writes,
or some operation on the files of a checkpoint. Reports for each death what it was and what was left, and the last state of both runs.
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import threading
import time
from pathlib import Path

import torch

import megaflow.actor.actor  # noqa: F401 (imported before the fork, once for all)
from megaflow.checkpoint import manifest, shards
from megaflow.checkpoint.directory import Retention, find
from megaflow.checkpoint.loading import load
from megaflow.checkpoint.saver import Saver
from megaflow.checkpoint.saving import Content
from megaflow.config.schema import ParallelConfig
from megaflow.parallel import device
from megaflow.parallel.mesh import Mesh
from tests.programs import checkpoint_train, forked
from tests.programs.checkpoint_train import JOB, digests, make_actor
from tests.ranks import report

RANKS, STEPS = 2, 12
OPERATIONS = {"open", "os.rename", "os.remove", "os.rmdir", "os.mkdir"}
MOMENTS = 120  # of which one is drawn: about those of two saves
SLOW_S = 0.002  # for each tensor: a step is made while it is written


def main() -> None:
    model, directory, kills = sys.argv[1], Path(sys.argv[2]), int(sys.argv[3])
    start = time.perf_counter()
    codes = forked.wait(forked.start(RANKS, lambda: life(model, directory / "straight", 0, -1)))
    assert codes == [0] * RANKS, codes
    print("undisturbed:", time.perf_counter() - start, flush=True)
    rng = random.Random(7)
    deaths = [one_death(model, directory / "killed", rng) for _ in range(kills)]
    codes = forked.wait(forked.start(RANKS, lambda: life(model, directory / "killed", 0, -1)))
    assert codes == [0] * RANKS, codes
    print("all:", time.perf_counter() - start, flush=True)
    ends = {
        name: [json.loads((directory / name / f"end_{rank}.json").read_text()) for rank in range(RANKS)] for name in ("straight", "killed")
    }
    report(deaths=deaths, **ends)


def one_death(model: str, directory: Path, rng: random.Random) -> dict:
    victim, moment = rng.randrange(RANKS), rng.randrange(MOMENTS)
    pids = forked.start(RANKS, lambda: life(model, directory, victim, moment))
    first, state = os.waitpid(pids[victim], 0)
    for pid in pids:
        if pid != first:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
    found = find(directory)
    damaged = manifest.damaged(found[1], manifest.read(found[1])) if found else []
    place = directory / "death"
    how = place.read_text() if place.exists() else "none"
    place.unlink(missing_ok=True)
    return {"code": os.waitstatus_to_exitcode(state), "how": how, "left": found[0] if found else 0, "damaged": damaged}


def life(model: str, directory: Path, victim: int, moment: int) -> None:
    torch.set_num_threads(1)
    device.seed_everything(1000 + os.getpid())  # a checkpoint's random states must win over it
    parallel = ParallelConfig()
    mesh = Mesh.create(parallel)
    directory.mkdir(exist_ok=True)
    actor = make_actor({**JOB, "model": model}, parallel, mesh)
    found = mesh.on_rank0(find, directory)
    step = 0
    if found is None:
        device.seed_everything(1)
    else:
        step = load(found[1], actor, mesh)["step"]
    saver = Saver(mesh, directory, Retention(1), in_background=True)
    with Death(directory, moment if mesh.rank == victim else -1):
        while step < STEPS:
            step += 1
            checkpoint_train.train_step(actor, mesh, step, scale=mesh.on_rank0(lambda: float(torch.rand(()))))
            saver.save(Content(step, actor, {"step": step}))
            saver.poll()
        saver.settle()
    end = {"state": digests(actor), "draw": float(torch.rand(()))}
    (directory / f"end_{mesh.rank}.json").write_text(json.dumps(end))
    mesh.close()


class Death:
    """SIGKILL at the given moment; moments are tensors written by the thread and operations on the checkpoints' files. -1: never."""

    def __init__(self, directory: Path, moment: int):
        self.directory, self.left, self.lock = directory, moment, threading.Lock()
        self.is_on = False

    def __enter__(self) -> None:
        sys.addaudithook(self.look)
        write_item = shards.ShardWriter._write_item

        def slow(writer, *args):
            time.sleep(SLOW_S)
            self.passed("tensor")
            return write_item(writer, *args)

        shards.ShardWriter._write_item = slow
        self.is_on = True

    def __exit__(self, *_) -> None:
        self.is_on = False

    def look(self, event: str, arguments: tuple) -> None:
        if self.is_on and event in OPERATIONS and "step_" in str(arguments[0]):
            self.passed(f"{event} {Path(str(arguments[0])).name}")

    def passed(self, what: str) -> None:
        with self.lock:
            self.left -= 1
            if self.left != -1 or not self.is_on:
                return
            self.is_on = False
            (self.directory / "death").write_text(f"{what} in {threading.current_thread().name}")
            os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    main()
