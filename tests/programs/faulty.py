"""A rollout backend in a file: the hf one, with a fault in the trainer's log-probabilities on rank 1, in the second step."""

from __future__ import annotations

import time
from pathlib import Path

from megaflow.actor.actor import Actor
from megaflow.config.schema import Config
from megaflow.rollout.hf import HFRollout


def rollout(config: Config, mesh, tokenizer, stop_token_ids: list[int]) -> HFRollout:
    whole, calls = Actor.logprobs, []

    def logprobs(self, samples):
        calls.append(1)
        if mesh.rank == 1 and len(calls) == 2:
            Path(config.run.root, "failed_at").write_text(repr(time.time()))
            raise ArithmeticError("a stray cosmic ray")
        return whole(self, samples)

    Actor.logprobs = logprobs
    return HFRollout(config, mesh, tokenizer, stop_token_ids)
