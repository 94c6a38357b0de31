"""A reward model in an engine over all ranks, by the path that training takes: MODEL SCORER. Reports scores, sleep, and its death.

Every rank holds samples of its own, as if its engine had made them.
"""

from __future__ import annotations

import dataclasses
import os
import signal
import sys

import psutil
import torch

from megaflow.config.schema import RewardConfig, RewardModelConfig
from megaflow.data import load_tokenizer
from megaflow.parallel import device
from megaflow.parallel.mesh import Mesh
from megaflow.rewards import RewardPool
from megaflow.rollout.restarts import Restarts
from megaflow.trainer.mesh_scorer import start_reward_engines
from megaflow.trainer.scoring import score
from tests import tiny
from tests.ranks import report


def held_mb(engine) -> float:
    """On the device, or address space of the engine's first scheduler: a sleeping one has no KV cache."""
    if device.on_cuda():
        free, total = torch.cuda.mem_get_info()
        return (total - free) / 1e6
    return psutil.Process(engine.processes[0].pid).memory_info().vms / 1e6 if engine else 0.0


def main() -> None:
    model, folder = sys.argv[1:3]
    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    settings = RewardModelConfig(where="engine", path=folder, tp=ranks, weight=0.5)
    cfg = dataclasses.replace(tiny.config(model), reward=RewardConfig(model=settings))
    cfg = dataclasses.replace(cfg, sampling=dataclasses.replace(cfg.sampling, max_new_tokens=8192))  # a KV cache that shows
    mesh = Mesh.create(cfg.parallel)
    restarts = Restarts(mesh, 1)
    scorer = start_reward_engines(cfg, mesh, load_tokenizer(model), restarts)
    rewards = RewardPool(cfg.reward) if mesh.rank == 0 else None
    mine = [s for s in tiny.samples(24, scorer.model.shape.vocab_size) if s.group % mesh.world_size == mesh.rank]
    engine = scorer.model.engine
    memory = {"start": held_mb(engine)}
    score(mesh, rewards, mine, scorer)
    with scorer.model.awake():
        memory["awake"] = held_mb(engine)
    memory["asleep"] = held_mb(engine)
    again = [s.reward_parts["model"] for s in mine]
    score(mesh, rewards, mine, scorer)
    scores = [s.reward_parts["model"] for s in mine]
    with scorer.model.awake():
        if engine:
            os.kill(engine.processes[-1].pid, signal.SIGKILL)
        scorer.model.scores(mine)
    score(mesh, rewards, mine, scorer)
    places = [(s.group, s.index) for s in mine]
    after_death = [s.reward_parts["model"] for s in mine]
    processes = [*engine.processes, *scorer.model.engine.processes] if engine else []
    scorer.close()
    gone = [not psutil.pid_exists(p.pid) for p in processes]
    if rewards is not None:
        rewards.close()
    seconds = engine.seconds if engine else {}
    mesh.close()
    found = {"places": places, "scores": scores, "again": again, "rewards": [s.reward for s in mine]}
    report(**found, memory=memory, after_death=after_death, restarts=restarts.drain(), gone=gone, seconds=seconds)


if __name__ == "__main__":
    main()
