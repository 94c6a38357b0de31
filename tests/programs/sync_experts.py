"""Experts into an engine: MODEL TP EP ROLLOUT_TP ROLLOUT_EP [BACKEND]. Two rounds of sync (pulled, then in buckets), generation and update
with the engine's routes replayed, then a trainer whose routers differ from the engine's, then a flipped value in an expert."""

from __future__ import annotations

import dataclasses
import sys

import torch

from megaflow.algo.losses import objective
from megaflow.data import load_tokenizer
from megaflow.data.packing import split_balanced
from megaflow.parallel.mesh import Mesh
from megaflow.rollout import BACKENDS
from megaflow.rollout.published import published_tensors
from megaflow.shape import read_shape
from megaflow.trainer.build import build_actor, stop_token_ids
from megaflow.trainer.export import full_tensors
from megaflow.trainer.sync import Sync
from tests import tiny
from tests.programs.sync_matrix import TRANSPORTS, against_transformers, error_of, largest_and_mean
from tests.ranks import report


def main() -> None:
    model, tp, ep, rollout_tp, rollout_ep = sys.argv[1], *map(int, sys.argv[2:6])
    backend = sys.argv[6] if len(sys.argv) > 6 else "sglang"
    cfg = tiny.config(model, tp, 1, rollout_tp, backend=backend, actor={"router_replay": "R3"})
    cfg = dataclasses.replace(cfg, parallel=dataclasses.replace(cfg.parallel, ep=ep, sp=tp > 1))
    cfg = dataclasses.replace(cfg, rollout=dataclasses.replace(cfg.rollout, ep=rollout_ep))
    mesh = Mesh.create(cfg.parallel, rollout_tp)
    actor = build_actor(cfg, mesh)
    tokenizer = load_tokenizer(model)
    rollout = BACKENDS.get(cfg.rollout.backend)(cfg, mesh, tokenizer, stop_token_ids(model, tokenizer))
    syncs = [Sync(dataclasses.replace(cfg, sync=dataclasses.replace(cfg.sync, transport=t)), mesh, actor, rollout) for t in TRANSPORTS]
    asked = tiny.prompts(8, actor.shape.vocab_size)
    rounds = []
    for version in range(2):
        stats = syncs[version](version)
        samples = rollout.generate(asked, cfg.sampling, (0, version), 4, version, routes=True)
        cached = rollout.generate(asked, cfg.sampling, (0, version + 2), 1, version, routes=True)  # prompts that the engine has seen
        rollout.sleep(2)
        actor.wake()
        weights = {n: t.clone() for n, t in full_tensors(actor, cfg, mesh)}
        worst = against_transformers(model, weights, samples) if samples else (0.0, 0.0)
        routes = routes_against_transformers(model, weights, samples + cached)
        samples = mesh.scatter(samples, split_balanced)
        differences = []
        for s, logp in zip(samples, actor.logprobs(samples), strict=True):
            differences.append((logp - s.rollout_logp).abs())
            s.old_logp, s.advantage = logp, (-1.0) ** s.index
        routes |= actor.route_stats() | {"same bits without replay": same_bits_without_replay(actor, samples)}
        if version == 1:
            noisy = with_noisy_routers(actor, samples)
        update = actor.update(samples, objective, cfg.algo)
        rounds.append({"stats": stats, "transformers": worst, "trainer": largest_and_mean(differences), "update": update, "routes": routes})
    pull, buckets = (s.source for s in syncs)
    reading = pull.reading
    pieces = [i for i, p in enumerate(reading.pieces) if ".experts.local_experts." in p.parameter]
    pull.flip = pieces[len(pieces) // 2]
    buckets.flip = next(b.index for b in reversed(buckets.plan.buckets) if b.items[0].row.expert >= 0 and b.entries)
    flipped = [error_of(lambda s=s: s(2)) for s in syncs]
    pull.flip = -1
    mended = error_of(lambda: syncs[0](3))
    piece = reading.pieces[pieces[len(pieces) // 2]]
    read = sorted({p.parameter for p in reading.pieces if p.parameter})
    report(
        rounds=rounds, noisy=noisy, flipped=flipped, mended=mended, read=read, nbytes=reading.nbytes, link_bytes=reading.link_bytes,
        flipped_source=piece.source, flipped_tensor=reading.targets[piece.target].name,
        targets={t.name: list(t.shape) for t in reading.targets},
    )  # fmt: skip
    rollout.close()
    mesh.close()


def routes_against_transformers(model: str, weights: dict[str, torch.Tensor], samples) -> dict[str, int]:
    """How many of the engine's routes (token, layer, expert) transformers chooses too, with the trainer's weights, and of how many."""
    from transformers import AutoModelForCausalLM

    if not samples:
        return {"agreeing": 0, "all": 0}
    reference = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    named = published_tensors(reference.state_dict(), read_shape(model))
    for name, t in weights.items():
        named[name].data.copy_(t)
    chosen: list[torch.Tensor] = []
    for layer in reference.model.layers:
        layer.mlp.gate.register_forward_hook(lambda gate, inputs, output: chosen.append(output[2]))
    agreeing = 0
    for s in samples:
        chosen.clear()
        with torch.no_grad():
            reference(torch.tensor([s.prompt.tokens + s.response.tolist()]))
        theirs = torch.stack(chosen, 1)[:-1]  # [T - 1, L, K]
        assert s.routes.shape == theirs.shape, f"{s.routes.shape} of the engine, {theirs.shape} of transformers"
        agreeing += int((s.routes.long()[..., :, None] == theirs[..., None, :]).sum())
    return {"agreeing": agreeing, "all": sum(s.routes.numel() for s in samples)}


def same_bits_without_replay(actor, samples) -> bool:
    replayed = actor.logprobs(samples)
    with actor.free_routes():
        free = actor.logprobs(samples)
    actor.route_stats()
    return all(torch.equal(a, b) for a, b in zip(replayed, free, strict=True))


def with_noisy_routers(actor, samples) -> dict[str, float]:
    """How far the trainer's log-probabilities are from the engine's when its routers' weights are a little off, root mean square: with the
    engine's routes and without, and the part of the routes that differ."""
    routers = {n: p for n, p in actor.parameters.items() if n.endswith("router.weight")}
    before = {n: p.detach().clone() for n, p in routers.items()}
    with torch.no_grad():
        for number, name in enumerate(sorted(routers)):
            p, g = routers[name], torch.Generator().manual_seed(number)
            p.add_(0.03 * p.std() * torch.randn(p.shape, generator=g))
    replayed, differ = actor.logprobs(samples), actor.route_stats()
    with actor.free_routes():
        free = actor.logprobs(samples)
    with torch.no_grad():
        for name, p in routers.items():
            p.copy_(before[name])
    differences = [torch.cat([a - s.rollout_logp for a, s in zip(logps, samples, strict=True)]) for logps in (replayed, free)]
    rms = [float(d.square().mean().sqrt()) for d in differences]
    return {"replayed": rms[0], "free": rms[1], "differ": differ["moe/routes_differ"]}


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
