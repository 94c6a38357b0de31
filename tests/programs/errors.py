"""One rank fails while the others wait for it in a collective: KIND RUN_ROOT. It first writes the time to RUN_ROOT/failed_at."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

import torch.distributed as dist

from megaflow.checkpoint.directory import find
from megaflow.config.schema import Config, ParallelConfig, RunConfig
from megaflow.parallel.mesh import Mesh
from megaflow.trainer.run import Run
from megaflow.types import PreflightError


def main() -> None:
    kind, root = sys.argv[1], Path(sys.argv[2])
    cfg = Config(run=RunConfig(name="r", root=str(root), steps=3, timeout_s=300), parallel=ParallelConfig(tp=2))
    mesh = Mesh.create(cfg.parallel, 1, cfg.run.timeout_s)
    with Run.open(cfg, mesh, find) as run:
        for step in run.steps():
            if step == 2:
                mesh.barrier()
                fail(kind, mesh, root)
            run.log(step, {"reward/mean": 0.0})
        run.finish()


def fail(kind: str, mesh: Mesh, root: Path) -> None:
    """On rank 1; rank 0 waits in the host group or in the tensor-parallel group, and `on_rank0` fails there."""
    if kind == "on_rank0":
        mark(root) if mesh.rank == 0 else None
        mesh.on_rank0(lambda: 1 / 0)
    if mesh.rank == 1:
        time.sleep(0.5)  # rank 0 is then inside the collective
        mark(root)
        if kind == "raise_tp":
            raise ValueError("the cat sat on the keyboard")
        if kind == "preflight":
            raise PreflightError("no room on this host")
        if kind == "exit":
            os._exit(7)
        assert kind == "kill", kind
        os.kill(os.getpid(), signal.SIGKILL)
    if kind == "raise_tp":
        dist.barrier(mesh.tp.group)
    else:
        mesh.all_gather(mesh.rank)


def mark(root: Path) -> None:
    (root / "failed_at").write_text(repr(time.time()))


if __name__ == "__main__":
    main()
