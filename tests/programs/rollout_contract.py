"""What every backend must do, in one process: MODEL BACKEND. Reports what it found; the test compares with transformers' own numbers."""

from __future__ import annotations

import dataclasses
import os
import signal
import sys
import time

import psutil
import torch

from megaflow.data import load_tokenizer
from megaflow.monitor import stacks
from megaflow.parallel.mesh import Mesh
from megaflow.rollout import BACKENDS
from megaflow.trainer.build import build_actor, stop_token_ids
from megaflow.trainer.export import full_tensors
from megaflow.trainer.recovery import SteadyRollout
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
        found["stacks"] = [stacks.of_process(p.pid) for p in (rollout.engine.host, *rollout.engine.processes)]
        found |= recovery(rollout, sync, lambda: generate(version=3, max_new_tokens=200, samples=2), tokens(long))
    else:
        found["example"] = example(cfg, mesh, actor, asked)
    report(**found)
    rollout.close()
    mesh.close()


def example(cfg, mesh, actor, asked) -> dict:
    """The backend that the documentation shows, with buckets: the other way than the test's own."""
    cfg = dataclasses.replace(cfg, sync=dataclasses.replace(cfg.sync, transport="buckets"))
    tokenizer = load_tokenizer(cfg.model.path)
    make = BACKENDS.get("docs/examples/generate_backend.py:GenerateRollout")
    rollout = make(cfg, mesh, tokenizer, stop_token_ids(cfg.model.path, tokenizer))

    def generate(count: int = 2, **changes):
        return rollout.generate(asked[:count], dataclasses.replace(cfg.sampling, **changes), (0, 1), 2, 4)

    actor.wake()
    found: dict = {"stale": error_of(generate), "proof": Sync(cfg, mesh, actor, rollout)(4)["sync/proof"]}
    drawn = generate()
    found["samples"] = [(s.prompt.tokens, s.response.tolist(), s.rollout_logp.tolist(), s.version) for s in drawn]
    found["again"] = tokens(generate(1)) == tokens(drawn)[:2]
    found["greedy"] = tokens(generate(1, temperature=0.0))[0]
    rollout.sleep(2)
    rollout.sleep(2)  # does nothing
    rollout.wake(("weights", "kv_cache"))
    found["asleep"] = error_of(generate)
    rollout.close()
    return found


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


def recovery(rollout, sync, generate, expected: list[list[int]]) -> dict:
    """The scheduler stops for good when the first of 16 samples is there, and another engine takes its place; then that one dies."""
    found: dict = {"asked": []}
    old = [rollout.engine.host.pid, *(p.pid for p in rollout.engine.processes)]
    settings, scratch = rollout.config, rollout.engine._scratch.path
    rollout.config = dataclasses.replace(settings, rollout=dataclasses.replace(settings.rollout, timeout_s=2.0))
    stop_after(rollout, 1, found["asked"])

    def bring_back() -> None:
        found["hang"] = [time.monotonic() - start, rollout.engine.dead]
        rollout.config = settings
        sync._make_ready()
        found["gone"] = not any(psutil.pid_exists(pid) for pid in old) and not scratch.exists()
        found["unsynced"] = error_of(generate)
        count_requests(rollout, found["asked"])
        sync._sync(3)

    start = time.monotonic()
    found["replaced"] = tokens(sync.restarts.again(generate, bring_back)) == expected
    found["stats"] = sync.restarts.drain()
    os.kill(rollout.engine.processes[0].pid, signal.SIGKILL)
    sync.restarts.limit, start = 1, time.monotonic()
    found["death"] = [error_of(lambda: SteadyRollout(rollout, sync).sleep(2)), time.monotonic() - start]
    return found


def stop_after(rollout, answers: int, asked: list[int]) -> None:
    """SIGSTOP to the scheduler when so many samples are there."""
    whole = rollout.engine.generate

    def stopping(requests, *more):
        asked.append(len(requests))
        for number, answer in enumerate(whole(requests, *more)):
            yield answer
            if number + 1 == answers:
                os.kill(rollout.engine.processes[0].pid, signal.SIGSTOP)

    rollout.engine.generate = stopping


def count_requests(rollout, asked: list[int]) -> None:
    whole = rollout.engine.generate
    rollout.engine.generate = lambda requests, *more: (asked.append(len(requests)), whole(requests, *more))[1]


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
