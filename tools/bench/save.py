"""What a checkpoint costs a run, written at once and written while the run goes on, beside bare copies and writes of as many bytes.

    python tools/bench/make_model.py smollm2-135m models/bench-135m
    python tools/bench/save.py models/bench-135m model.dtype=float32 --directory /tmp/bench-save --json save.json

hold      seconds for which a save keeps the loop from its next step; the first also allocates host memory, and is told apart
write     seconds in which the files are written, fsynced and measured, of the slowest rank
step      seconds of the step that is made meanwhile: one optimizer step on made-up samples
cost      seconds by which a run of steps with a save in it is longer than the same steps without: hold, and what the writing takes of them
"""

from __future__ import annotations

import os
import shutil
import statistics
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent.parent))

from tools.bench import actor_alone as alone

LENGTHS = [(32, 32)] * 4
CHUNK = 1 << 26


def main() -> None:
    parser = alone.arguments("what a checkpoint costs a run")
    parser.add_argument("--directory", type=Path, required=True, help="where the checkpoints go, on the disk to be measured; emptied")
    options = parser.parse_args()
    cfg, mesh, actor = alone.build(options.folder, options.overrides)
    samples = alone.spread(alone.made_samples(LENGTHS, actor.shape.vocab_size), mesh, actor)
    bench = Bench(cfg, mesh, actor, samples, options.directory)
    figures: dict[str, Any] = {"step_seconds": alone.median_seconds(mesh, bench.step, options.repeats)}
    for in_background in (False, True):
        figures |= bench.measure(in_background, options.repeats, figures["step_seconds"])
    if mesh.rank == 0:
        figures |= bare(int(figures["bytes"]), options.directory, options.repeats)
        shutil.rmtree(options.directory)
    mesh.barrier()
    alone.report(mesh, options, figures)


class Bench:
    def __init__(self, cfg, mesh, actor, samples: list, directory: Path):
        self.cfg, self.mesh, self.actor, self.samples, self.directory = cfg, mesh, actor, samples, directory

    def step(self) -> None:
        alone.update(self.actor, self.cfg, self.samples)

    def measure(self, in_background: bool, repeats: int, step_seconds: float) -> dict[str, float]:
        from megaflow.checkpoint.directory import Retention
        from megaflow.checkpoint.saver import Saver

        saver = Saver(self.mesh, self.directory, Retention(1), in_background)
        rows = [self._save(saver, number, step_seconds) for number in range(1 + repeats)]
        name = "async" if in_background else "sync"
        found = {f"{name}_{what}_seconds": statistics.median(row[what] for row in rows[1:]) for what in ("hold", "write", "cost")}
        return {"bytes": rows[0]["bytes"], f"{name}_first_hold_seconds": rows[0]["hold"], **found}

    def _save(self, saver, number: int, step_seconds: float) -> dict[str, float]:
        """One save, and steps until it is whole; at least one."""
        from megaflow.checkpoint.saving import Content

        self.mesh.barrier()
        start = time.perf_counter()
        whole = saver.save(Content(number, self.actor, {}))
        self.mesh.barrier()
        hold = time.perf_counter() - start
        steps = 0
        while not whole or not steps:
            self.step()
            steps += 1
            whole = whole or saver.poll()
        self.mesh.barrier()
        cost = time.perf_counter() - start - steps * step_seconds
        return {"hold": hold, "write": whole[0].write_s, "cost": cost, "bytes": whole[0].num_bytes}


def bare(size: int, directory: Path, repeats: int) -> dict[str, float]:
    """A copy of `size` bytes within host memory that is there already, and a write of them to a file, with fsync."""
    import torch

    source, target = torch.zeros(size, dtype=torch.uint8), torch.ones(size, dtype=torch.uint8)
    copies, writes = [], []
    for _ in range(repeats):
        start = time.perf_counter()
        target.copy_(source)
        copies.append(time.perf_counter() - start)
        start = time.perf_counter()
        with (directory / "bare").open("wb") as file:
            for place in range(0, size, CHUNK):
                file.write(memoryview(source.numpy())[place : place + CHUNK])
            file.flush()
            os.fsync(file.fileno())
        writes.append(time.perf_counter() - start)
    return {"bare_copy_seconds": statistics.median(copies), "bare_write_seconds": statistics.median(writes)}


if __name__ == "__main__":
    main()
