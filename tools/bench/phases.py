"""Seconds of rollout, reward, log-probabilities and update alone: each again and again on the same work, engine and actor both awake.

Part of tools/bench/step.py, which starts it: phases.py OUT.json key=value ...
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent.parent))

REPEATS = 3


def main() -> None:
    from megaflow.config.caches import use_cache_dir
    from megaflow.config.loading import load

    out, *overrides = sys.argv[1:]
    cfg = load(None, overrides).config
    use_cache_dir(cfg.run.cache_dir)
    from megaflow.parallel import device
    from megaflow.parallel.mesh import Mesh
    from megaflow.trainer.build import build

    device.seed_everything(cfg.run.seed)
    mesh = Mesh.create(cfg.parallel, cfg.rollout.tp, cfg.run.timeout_s)
    parts = build(cfg, mesh)
    parts.sync(0)
    parts.actor.wake()
    found = measured(cfg, mesh, parts)
    if mesh.rank == 0:
        Path(out).write_text(json.dumps(found))
    parts.close()
    mesh.close()


def measured(cfg: Any, mesh: Any, parts: Any) -> dict[str, float]:
    """The same calls as in a step (megaflow/trainer/loop.py), without what lies between them."""
    from megaflow.algo.losses import objective
    from megaflow.trainer.logic import apply_decisions, make_batch
    from megaflow.trainer.loop import add_logprobs

    actor, seconds = parts.actor, {}
    generated, judged = [], []
    for _ in range(REPEATS + 1):
        draw = parts.sampler.begin(1)
        generated.append(timed(lambda d=draw: setattr(d, "made", d.generate())))
        judged.append(timed(lambda d=draw: d.judge(d.made)))
    seconds["rollout"], seconds["reward"] = (statistics.median(each[1:]) for each in (generated, judged))
    samples = mesh.scatter(draw.finish(), actor.cost.balanced)
    seconds["logprob"] = median(lambda: add_logprobs(parts, samples))
    batch = mesh.on_rank0(make_batch, mesh.gather(samples, parts.needs_tokens), cfg)
    samples = mesh.scatter(apply_decisions(samples, batch), actor.cost.balanced)
    seconds["update"] = median(lambda: actor.update(samples, objective, cfg.algo))
    return seconds


def timed(action: Callable[[], Any]) -> float:
    from megaflow.parallel import device

    device.synchronize()
    start = time.perf_counter()
    action()
    device.synchronize()
    return time.perf_counter() - start


def median(action: Callable[[], Any]) -> float:
    return statistics.median([timed(action) for _ in range(REPEATS + 1)][1:])


if __name__ == "__main__":  # the engine's processes import this file
    main()
