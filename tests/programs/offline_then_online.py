"""A run that learns from stored pairs, then online; and another that goes on from the first one's checkpoint of step 1: STRAIGHT BRANCH."""

from __future__ import annotations

import sys

import torch

from megaflow.config.loading import load
from megaflow.config.schema import Config
from megaflow.trainer.loop import train
from tests.programs import forked
from tests.ranks import report


def main() -> None:
    configs = [load(path, []).config for path in sys.argv[1:3]]
    report(codes=[forked.wait(forked.start(1, lambda cfg=cfg: work(cfg))) for cfg in configs])


def work(cfg: Config) -> None:
    torch.set_num_threads(1)
    train(cfg)


if __name__ == "__main__":
    main()
