"""Generation undisturbed, and another one killed and started again until it is done: STRAIGHT KILLED KILLS. Each start is a fork.

Reports exit codes, how many chunks there were at each `kill -9`, and what is said to those who start a finished one again.
"""

from __future__ import annotations

import os
import random
import signal
import sys
import time
from pathlib import Path

import torch

from megaflow.config.loading import load
from megaflow.config.schema import Config
from megaflow.trainer.generate import generate_run, output_path
from megaflow.types import ConfigError
from tests.programs import forked
from tests.ranks import report


def main() -> None:
    straight, killed = (load(path, []).config for path in sys.argv[1:3])
    codes = forked.wait(forked.start(1, lambda: work(straight)))
    seen = killed_at(killed, int(sys.argv[3]))
    codes += forked.wait(forked.start(1, lambda: work(killed)))
    codes += forked.wait(forked.start(1, lambda: work(straight)))
    report(codes=codes, seen=seen, said=said(straight).read_text())


def killed_at(cfg: Config, kills: int) -> list[int]:
    """The first start is killed once it has one chunk, the second once it has two, ...: within a write, or the generation after it."""
    parts = Path(f"{output_path(cfg)}.parts")
    rng = random.Random(3)
    seen = []
    for after in range(1, kills + 1):
        (pid,) = forked.start(1, lambda: work(cfg))
        while len(list(parts.glob("part_*"))) < after:
            time.sleep(0.002)
        time.sleep(rng.uniform(0, 0.03))
        os.kill(pid, signal.SIGKILL)
        assert forked.wait([pid]) == [-signal.SIGKILL], "it was done before it could be killed"
        seen.append(len(list(parts.glob("part_*"))))
    return seen


def said(cfg: Config) -> Path:
    return output_path(cfg).with_suffix(".said")


def work(cfg: Config) -> None:
    torch.set_num_threads(1)
    try:
        generate_run(cfg)
    except ConfigError as error:
        said(cfg).write_text(str(error))
        sys.exit(error.exit_code)


if __name__ == "__main__":
    main()
