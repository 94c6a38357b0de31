"""A loss in a file: ppo_clip, but rank 1 stops (SIGSTOP) in the third step; the time goes into the file STOPPED_AT first."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

from megaflow.algo.losses import ppo_clip
from megaflow.monitor.progress import RECORD


def stopping_loss(logp, inputs, cfg):
    if RECORD.step == 3 and os.environ["RANK"] == "1":
        Path(os.environ["STOPPED_AT"]).write_text(repr(time.time()))
        os.kill(os.getpid(), signal.SIGSTOP)
    return ppo_clip(logp, inputs, cfg)
