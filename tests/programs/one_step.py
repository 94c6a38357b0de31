"""Two optimizer steps of an actor on given samples: MODEL TP PP MICRO_BATCH_TOKENS CLIP OUT [AGGREGATION [sp] [recompute] [overlap]
[grouped] [routes] [replicated] [ep=2] ...].

OUT gets the gradients of the first step and the final weights, by Hugging Face name; gradients are whole on one rank only, or where the
optimizer is `replicated`.
"""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path

import torch
from safetensors.torch import save_file

from megaflow.actor import optimizer
from megaflow.actor.experts import GroupedExperts, as_one
from megaflow.actor.memory import Sleeper
from megaflow.actor.optimizer import torch_optimizers
from megaflow.algo.losses import objective
from megaflow.config.schema import AlgoConfig, ClipConfig, KLConfig
from megaflow.data.packing import split_balanced
from megaflow.parallel.mesh import Mesh
from megaflow.trainer.build import build_actor
from megaflow.trainer.export import full_tensors
from tests import tiny
from tests.ranks import report

ALGO = AlgoConfig(clip=ClipConfig(0.2, 0.28), kl=KLConfig("loss", "k3", 0.05), entropy=0.01)


def everything(actor) -> list[torch.Tensor]:
    """What sleeps: parameters, main weights, moments."""
    adams = torch_optimizers(actor.optimizer)
    moments = [t for adam in adams for state in adam.state.values() for name, t in state.items() if name != "step"]
    main_weights = [p.data for adam in adams for group in adam.param_groups for p in group["params"]]
    return [*(p.data for p in actor.parameters.values() if p.requires_grad), *main_weights, *moments]


def assert_not_copied(actor) -> None:
    """The experts' weights, and their gradients, lie so that the grouped product takes them as they are."""
    found = [m for chunk in actor.model for m in chunk.modules() if isinstance(m, GroupedExperts)]
    for experts in found:
        for layer in ("linear_fc1", "linear_fc2"):
            weights = [getattr(e, layer).weight for e in experts.local_experts]
            for tensors in (weights, [w.main_grad for w in weights]):
                assert as_one(tensors).data_ptr() == tensors[0].data_ptr(), layer
    assert found, "grouped experts were asked for"


def main() -> None:
    model, tp, pp, micro, clip, out = sys.argv[1], *map(int, sys.argv[2:5]), float(sys.argv[5]), Path(sys.argv[6])
    algo = dataclasses.replace(ALGO, aggregation=sys.argv[7] if len(sys.argv) > 7 else "token")
    optimizer.OVERLAP_ON_CPU = "overlap" in sys.argv
    recompute = "full" if "recompute" in sys.argv else "none"
    actor_settings = {"clip_grad": clip, "recompute": recompute, "router_replay": "R3" if "routes" in sys.argv else "none"}
    actor_settings["distributed_optimizer"] = "replicated" not in sys.argv
    cfg = tiny.config(model, tp, pp, actor={"micro_batch_tokens": micro, **actor_settings}, algo=algo)
    sizes = {name: int(size) for name, _, size in (a.partition("=") for a in sys.argv[8:]) if size}
    cfg = dataclasses.replace(cfg, parallel=dataclasses.replace(cfg.parallel, sp="sp" in sys.argv, **sizes))
    cfg = dataclasses.replace(cfg, model=dataclasses.replace(cfg.model, experts="grouped" if "grouped" in sys.argv else "sequential"))
    mesh = Mesh.create(cfg.parallel)
    actor = build_actor(cfg, mesh)
    made = tiny.samples(24, actor.shape.vocab_size)
    if "routes" in sys.argv:
        tiny.with_routes(made, actor.shape.experts)
    for i, s in enumerate(made):
        s.mini_batch = i // 12
    mine = mesh.scatter(made if mesh.rank == 0 else [], split_balanced)
    logps, route_stats = actor.logprobs(mine), actor.route_stats()
    tiny.with_logprobs(mine, logps)
    if "grouped" in sys.argv:
        assert_not_copied(actor)
    first = actor.update([s for s in mine if s.mini_batch == 0], objective, algo)
    weights = actor.parameters
    actor.parameters = {n: getattr(p, "main_grad", p) for n, p in weights.items()}  # a buffer has no gradient and stands for itself
    gradients = {n: t.clone() for n, t in full_tensors(actor, cfg, mesh)}
    actor.parameters = weights
    actor.sleeper = Sleeper(actor.model, actor.optimizer, "all", on_cpu=True)
    before = [t.clone() for t in everything(actor)]
    actor.sleep()
    assert not any(t.untyped_storage().nbytes() for t in everything(actor)), "asleep, weights and optimizer state take no memory"
    assert all(not buffer.grad_data.untyped_storage().nbytes() for buffer in actor.model.grad_buffers), "asleep, gradients take no memory"
    actor.wake()
    assert all(torch.equal(a, b) for a, b in zip(before, everything(actor), strict=True)), "awake, everything is bitwise as it was"
    second = actor.update([s for s in mine if s.mini_batch == 1], objective, algo)
    final = {n: t.clone() for n, t in full_tensors(actor, cfg, mesh)}
    if mesh.rank == 0:
        out.mkdir(parents=True, exist_ok=True)
        save_file(gradients, out / "gradients.safetensors")
        save_file(final, out / "weights.safetensors")
    logps = {f"{s.group}.{s.index}": lp.tolist() for s, lp in zip(mine, logps, strict=True)}
    report(first=first, second=second, logps=logps, routes=route_stats)
    mesh.close()


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
