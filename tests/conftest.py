"""Settings of every test process: few threads, no network trackers, no colours in the messages that tests compare."""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")  # two cores, several ranks: more threads make each test slower
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ["WANDB_MODE"] = "offline"
os.environ["NO_COLOR"] = "1"
