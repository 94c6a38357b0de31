"""One actor on CUDA: MODEL DTYPE KERNELS. Reports log-probabilities, a step's figures, waits within micro batches, memory over sleeps."""

from __future__ import annotations

import dataclasses
import functools
import sys

import torch

from megaflow.actor.memory import Sleeper
from megaflow.actor.update import LossOfMicroBatch, mini_batches
from megaflow.algo.losses import objective
from megaflow.parallel.mesh import Mesh
from megaflow.trainer.build import build_actor
from tests import tiny
from tests.programs.one_step import ALGO, everything
from tests.ranks import report

CYCLES = 20


def main() -> None:
    model, dtype, kernels = sys.argv[1:4]
    cfg = tiny.config(model, actor={"micro_batch_tokens": 40}, algo=ALGO)
    cfg = dataclasses.replace(cfg, model=dataclasses.replace(cfg.model, dtype=dtype, kernels=kernels))
    mesh = Mesh.create(cfg.parallel)
    actor = build_actor(cfg, mesh)
    samples = tiny.samples(24, actor.shape.vocab_size)
    logps = actor.logprobs(samples)
    tiny.with_logprobs(samples, logps)
    stats = actor.update(samples, objective, ALGO)
    report(
        logps=torch.cat(logps).tolist(),
        stats=stats,
        waits=waits(actor, samples, mesh),
        memory={mode: asleep(actor, mode) for mode in ("optimizer", "all")},
    )
    mesh.close()


def waits(actor, samples, mesh) -> str:
    """What waited for the device within forward and backward of the micro batches; nothing: an empty string."""
    mini_batch = next(iter(mini_batches(mesh, samples)))
    loss_of = functools.partial(LossOfMicroBatch, mini_batch=mini_batch, objective=objective, algo=ALGO, device=actor.device)
    micro_batches = actor._micro_batches(samples)
    actor.model.zero_grad_buffer()
    torch.cuda.set_sync_debug_mode("error")
    try:
        actor._run(micro_batches, loss_of, forward_only=False)
    except RuntimeError as e:
        return str(e)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    return ""


def asleep(actor, mode: str) -> dict:
    """Memory of the device that this process holds (MB) in each of 20 sleeps, what an awake actor holds, and whether all came back."""
    actor.sleeper = Sleeper(actor.model, actor.optimizer, mode)
    torch.cuda.empty_cache()
    before, awake = [t.clone() for t in everything(actor)], torch.cuda.memory_reserved() / 2**20
    held = []
    for _ in range(CYCLES):
        actor.sleep()
        held.append((torch.cuda.memory_reserved() / 2**20, torch.cuda.memory_allocated() / 2**20))
        actor.wake()
    same = all(torch.equal(a, b) for a, b in zip(before, everything(actor), strict=True))
    return {"awake": awake, "reserved": [r for r, _ in held], "allocated": [a for _, a in held], "same": same}


if __name__ == "__main__":
    main()
