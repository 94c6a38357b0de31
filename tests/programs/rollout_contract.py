"""What every backend must do, in one process: MODEL BACKEND. Reports what it found; the test compares with transformers' own numbers."""

from __future__ import annotations

import dataclasses
import os
import signal
import sys
import time

import torch

from megaflow.data import load_tokenizer
from megaflow.parallel.mesh import Mesh
from megaflow.rollout import BACKENDS
from megaflow.trainer.build import build_actor, stop_token_ids
from megaflow.trainer.export import full_tensors
from megaflow.trainer.sync import Sync
from tests import tiny
from tests.ranks import report

STOP = ["e", "a", "t"]


def error_of(action) -> str:
    try:
        action()
    except Exception as e:
        return f"{type(e).__name__}: {e}"
    return ""


def tokens(samples) -> list[list[int]]:
    return [s.response.tolist() for s in samples]


def mapped_mb(rollout) -> float:
    """Address space of the engine's scheduler (not what is resident: its KV cache is zeros that few tokens have touched)."""
    import psutil

    engine = getattr(rollout, "engine", None)
    return psutil.Process(engine.processes[0].pid if engine else None).memory_info().vms / 1e6


def main() -> None:
    model, backend = sys.argv[1:3]
    cfg = tiny.config(model, backend=backend, sampling={"stop": ["no such text"]})  # stop strings need the engine's own tokenizer
    cfg = dataclasses.replace(cfg, rollout=dataclasses.replace(cfg.rollout, max_tokens=1 << 17))  # a KV cache that shows
    mesh = Mesh.create(cfg.parallel)
    actor = build_actor(cfg, mesh)
    with torch.no_grad():  # weights that are in no folder: whatever the engine serves, it must have come through the sync
        g = torch.Generator().manual_seed(5)
        for p in actor.parameters.values():
            p.mul_(1 + 0.1 * torch.randn(p.shape, generator=g))
    rollout = BACKENDS.get(backend)(cfg, mesh, load_tokenizer(model), stop_token_ids(model, load_tokenizer(model)))
    sync = Sync(cfg, mesh, actor, rollout)
    asked = tiny.prompts(8, actor.shape.vocab_size)
    found = {"stale before": error_of(lambda: rollout.generate(asked, cfg.sampling, (0, 1), 1, 0))}
    stats = sync(0)
    found["sync"] = stats

    def generate(seed=(0, 1), prompts=asked, samples=4, version=0, **changes):
        return rollout.generate(prompts, dataclasses.replace(cfg.sampling, **changes), seed, samples, version)

    first = generate()
    found["samples"] = [
        {"prompt": s.prompt.tokens, "response": s.response.tolist(), "logp": s.rollout_logp.tolist(), "group": s.group, "index": s.index,
         "finish": s.finish, "version": s.version}
        for s in first
    ]  # fmt: skip
    found["again"] = tokens(generate()) == tokens(first)
    found["alone"] = tokens(generate(prompts=asked[:1], samples=1)) == tokens(first)[:1]
    found["other step differs"] = tokens(generate(seed=(0, 2))) != tokens(first)
    found["other seed differs"] = tokens(generate(seed=(1, 1))) != tokens(first)
    found["greedy"] = tokens(generate(temperature=0.0, samples=1, ignore_eos=True))
    found["cold"] = [s.rollout_logp.tolist() for s in generate(temperature=0.5, samples=1)]
    found["cold tokens"] = tokens(generate(temperature=0.5, samples=1))
    long = generate(max_new_tokens=200, samples=2)
    found["ends"] = [(s.finish, s.response.tolist()[-1], len(s.response)) for s in long]
    stopped = generate(max_new_tokens=100, samples=2, stop=STOP)
    found["stopped"] = [(s.text, s.finish, s.response.tolist()) for s in stopped]
    found["top_k 1 is greedy"] = tokens(generate(top_k=1, samples=1, ignore_eos=True)) == found["greedy"]
    found["stale"] = error_of(lambda: generate(version=7))
    found["weights"] = {n: t.tolist() for n, t in full_tensors(actor, cfg, mesh)}
    found |= asleep_and_awake(rollout, actor, sync, generate, tokens(first))
    if backend == "sglang":
        found["hang"] = hang(rollout, generate)
        found["death"] = death(rollout, generate)
    report(**found)
    rollout.close()
    mesh.close()


def asleep_and_awake(rollout, actor, sync, generate, expected: list[list[int]]) -> dict:
    """Sleep, wake and sync in every order that a loop may take, and a proof that fails."""
    found = {}
    awake = mapped_mb(rollout)
    rollout.sleep(2)
    found["freed_mb"] = awake - mapped_mb(rollout)
    found["asleep"] = error_of(lambda: generate())
    found["two-step wake"] = error_of(lambda: (rollout.wake(("weights",)), rollout.wake(("kv_cache",))))
    found["woken without weights"] = error_of(lambda: generate())
    actor.wake()
    sync(1)
    found["after sleep"] = tokens(generate(version=1)) == expected
    rollout.sleep(1)
    rollout.wake(("weights", "kv_cache"))
    found["level 1 keeps weights"] = tokens(generate(version=1)) == expected
    actor.wake()
    sync.source.flip = 1
    found["flipped"] = error_of(lambda: sync(2))
    found["after a failed proof"] = error_of(lambda: generate(version=2))
    sync.source.flip = -1
    actor.wake()
    sync(3)
    found["mended"] = tokens(generate(version=3)) == expected
    return found


def hang(rollout, generate) -> list:
    """Stop the scheduler for a while."""
    rollout.config = dataclasses.replace(rollout.config, rollout=dataclasses.replace(rollout.config.rollout, timeout_s=2.0))
    pid = rollout.engine.processes[0].pid
    os.kill(pid, signal.SIGSTOP)
    start = time.monotonic()
    message = error_of(lambda: generate(version=3))
    os.kill(pid, signal.SIGCONT)
    return [message, time.monotonic() - start]


def death(rollout, generate) -> list:
    os.kill(rollout.engine.processes[0].pid, signal.SIGKILL)
    start = time.monotonic()
    return [error_of(lambda: generate(version=3)), time.monotonic() - start]


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
