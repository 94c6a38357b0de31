"""An engine sleeps and wakes again and again: engine_memory.py MODEL LEVEL. Reports what it serves and what stays on the device."""

from __future__ import annotations

import dataclasses
import sys

import torch

from megaflow.data import load_tokenizer
from megaflow.monitor.memory import GB, CudaProbe
from megaflow.parallel import device
from megaflow.parallel.mesh import Mesh
from megaflow.rollout import BACKENDS
from megaflow.trainer.build import build_actor, stop_token_ids
from megaflow.trainer.sync import Sync
from tests import tiny
from tests.ranks import report

TURNS = 8


def main() -> None:
    model, level = sys.argv[1], sys.argv[2]
    cfg = tiny.config(model)
    cfg = dataclasses.replace(cfg, rollout=dataclasses.replace(cfg.rollout, sleep_level=level, max_tokens=1 << 18, cuda_graph=True))
    mesh = Mesh.create(cfg.parallel)
    tokenizer = load_tokenizer(model)
    rollout = BACKENDS.get("sglang")(cfg, mesh, tokenizer, stop_token_ids(model, tokenizer))
    actor = build_actor(cfg, mesh)
    sync = Sync(cfg, mesh, actor, rollout)
    asked = tiny.prompts(8, actor.shape.vocab_size)
    greedy = dataclasses.replace(cfg.sampling, temperature=0.0, ignore_eos=True)

    def used_gb() -> float:
        return CudaProbe().device_used() / GB if device.on_cuda() else 0.0

    found: dict = {"tokens": [], "awake": [], "asleep": [], "kv_tokens": rollout.engine.kv_tokens}
    sync(0)
    for _ in range(TURNS):
        found["tokens"].append([s.response.tolist() for s in rollout.generate(asked, greedy, (0, 1), 1, 0)])
        found["awake"].append(used_gb())
        rollout.sleep(int(level))
        found["asleep"].append(used_gb())
        if level == "2":
            actor.wake()
            sync(0)
        else:
            rollout.wake(("weights", "kv_cache"))
    found["kv_tokens"] = rollout.engine.kv_tokens
    found["seconds"] = rollout.startup_seconds()
    report(**found)
    rollout.close()
    mesh.close()


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
