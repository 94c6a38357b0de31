"""Go on from the newest checkpoint and save again and again, as fast as it goes, until killed.

    checkpoint_loop.py MODEL DIRECTORY
"""

from __future__ import annotations

import sys
from pathlib import Path

from megaflow.config.schema import ParallelConfig
from megaflow.parallel.mesh import Mesh
from tests.programs.checkpoint_train import JOB, make_actor


def main() -> None:
    from megaflow.checkpoint.directory import Retention, find
    from megaflow.checkpoint.loading import load
    from megaflow.checkpoint.saving import Content, save

    directory = Path(sys.argv[2])
    parallel = ParallelConfig()
    mesh = Mesh.create(parallel)
    actor = make_actor({**JOB, "model": sys.argv[1]}, parallel, mesh)
    step = 0
    if found := find(directory):
        step = load(found[1], actor, mesh)["step"]
    while True:
        print(step, flush=True)
        step += 1
        save(directory, Content(step, actor, {"step": step}), mesh, Retention(1))


if __name__ == "__main__":
    main()
