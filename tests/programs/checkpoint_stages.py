"""One layout after another, on ranks of its own that are forked from this process: '[{"ranks": 2, "axes": {...}, "jobs": [...]}, ...]'.

Jobs are those of checkpoint_train.py. Reports for each stage what each of its ranks has found.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import torch

import megaflow.actor.actor
import megaflow.checkpoint.loading
import megaflow.checkpoint.saver  # noqa: F401 (imported before the fork, once for all)
from tests.programs import checkpoint_train, forked
from tests.ranks import report


def main() -> None:
    reports = Path(os.environ["REPORTS"])
    stages = json.loads(sys.argv[1])
    found = []
    for number, stage in enumerate(stages):
        folder = reports / f"stage_{number}"
        folder.mkdir()
        codes = forked.wait(forked.start(stage["ranks"], lambda stage=stage, folder=folder: one_stage(stage, folder)))
        assert codes == [0] * stage["ranks"], (stage, codes)
        found.append([json.loads((folder / f"{rank}.json").read_text()) for rank in range(stage["ranks"])])
    report(stages=found)


def one_stage(stage: dict, folder: Path) -> None:
    torch.set_num_threads(1)
    records = checkpoint_train.Records()
    jobs = checkpoint_train.work(stage["axes"], stage["jobs"])
    (folder / f"{os.environ['RANK']}.json").write_text(json.dumps({"jobs": jobs, "log": records.texts}))


if __name__ == "__main__":
    main()
