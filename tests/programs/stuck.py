"""A rollout backend in a file: the hf one, but rank 1 stands still in its second call of `generate`; the time goes into STUCK_AT first."""

from __future__ import annotations

import os
import time
from pathlib import Path

from megaflow.config.schema import Config
from megaflow.rollout.hf import HFRollout


def rollout(config: Config, mesh, tokenizer, stop_token_ids: list[int]) -> HFRollout:
    return Stuck(config, mesh, tokenizer, stop_token_ids)


class Stuck(HFRollout):
    calls = 0

    def generate(self, *args, **kwargs):
        self.calls += 1
        if self.calls == 2 and self.mesh.rank == 1:
            Path(os.environ["STUCK_AT"]).write_text(repr(time.time()))
            time.sleep(10_000)
        return super().generate(*args, **kwargs)
