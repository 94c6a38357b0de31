"""Save a few times and look at every moment in between: before each operation on the file system a kill may strike.

    checkpoint_moments.py MODEL DIRECTORY
"""

from __future__ import annotations

import sys
from pathlib import Path

from megaflow.config.schema import ParallelConfig
from megaflow.parallel.mesh import Mesh
from tests.programs.checkpoint_train import JOB, make_actor
from tests.ranks import report

OPERATIONS = {"open", "os.rename", "os.remove", "os.rmdir", "os.mkdir", "os.truncate"}
DELETIONS = {"os.remove", "os.rmdir"}  # name the file within an open directory


def main() -> None:
    from megaflow.checkpoint import manifest
    from megaflow.checkpoint.directory import Retention, find
    from megaflow.checkpoint.saving import Content, save

    model, directory = sys.argv[1], Path(sys.argv[2])
    parallel = ParallelConfig()
    mesh = Mesh.create(parallel)
    actor = make_actor({**JOB, "model": model}, parallel, mesh)
    seen: list[tuple[str, int, str]] = []
    state = {"watching": False}

    def look(event: str, arguments: tuple) -> None:
        if not state["watching"] or event not in OPERATIONS:
            return
        if event not in DELETIONS and str(directory) not in str(arguments[0]):
            return
        state["watching"] = False
        found = find(directory)
        bad = ["nothing"] if found is None else manifest.damaged(found[1], manifest.read(found[1]))
        seen.append((event, found[0] if found else -1, "; ".join(bad)))
        state["watching"] = True

    sys.addaudithook(look)
    for step in (1, 2, 2, 3):
        save(directory, Content(step, actor, {}), mesh, Retention(1))
        state["watching"] = True
    state["watching"] = False
    report(moments=seen, left=sorted(p.name for p in directory.iterdir()))
    mesh.close()


if __name__ == "__main__":
    main()
