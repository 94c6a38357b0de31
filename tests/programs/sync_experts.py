"""Experts into an engine: MODEL TP EP ROLLOUT_TP ROLLOUT_EP [BACKEND]. Two rounds of sync, generation and update, then a flipped value in
an expert."""

from __future__ import annotations

import dataclasses
import sys

import torch

from megaflow.algo.losses import objective
from megaflow.data import load_tokenizer
from megaflow.data.packing import split_balanced
from megaflow.parallel.mesh import Mesh
from megaflow.rollout import BACKENDS
from megaflow.trainer.build import build_actor, stop_token_ids
from megaflow.trainer.export import full_tensors
from megaflow.trainer.sync import Sync
from tests import tiny
from tests.programs.sync_matrix import against_transformers, error_of, largest_and_mean
from tests.ranks import report


def main() -> None:
    model, tp, ep, rollout_tp, rollout_ep = sys.argv[1], *map(int, sys.argv[2:6])
    cfg = tiny.config(model, tp, 1, rollout_tp, backend=sys.argv[6] if len(sys.argv) > 6 else "sglang")
    cfg = dataclasses.replace(cfg, parallel=dataclasses.replace(cfg.parallel, ep=ep, sp=tp > 1))
    cfg = dataclasses.replace(cfg, rollout=dataclasses.replace(cfg.rollout, ep=rollout_ep))
    mesh = Mesh.create(cfg.parallel, rollout_tp)
    actor = build_actor(cfg, mesh)
    tokenizer = load_tokenizer(model)
    rollout = BACKENDS.get(cfg.rollout.backend)(cfg, mesh, tokenizer, stop_token_ids(model, tokenizer))
    sync = Sync(cfg, mesh, actor, rollout)
    asked = tiny.prompts(8, actor.shape.vocab_size)
    rounds = []
    for version in range(2):
        stats = sync(version)
        samples = rollout.generate(asked, cfg.sampling, (0, version), 4, version)
        rollout.sleep(2)
        actor.wake()
        weights = {n: t.clone() for n, t in full_tensors(actor, cfg, mesh)}
        worst = against_transformers(model, weights, samples) if samples else (0.0, 0.0)
        samples = mesh.scatter(samples, split_balanced)
        differences = []
        for s, logp in zip(samples, actor.logprobs(samples), strict=True):
            differences.append((logp - s.rollout_logp).abs())
            s.old_logp, s.advantage = logp, (-1.0) ** s.index
        update = actor.update(samples, objective, cfg.algo)
        rounds.append({"stats": stats, "transformers": worst, "trainer": largest_and_mean(differences), "update": update})
    reading = sync.source.reading
    pieces = [i for i, p in enumerate(reading.pieces) if ".experts.local_experts." in p.parameter]
    sync.source.flip = pieces[len(pieces) // 2]
    flipped = error_of(lambda: sync(2))
    sync.source.flip = -1
    mended = error_of(lambda: sync(3))
    piece = reading.pieces[pieces[len(pieces) // 2]]
    read = sorted({p.parameter for p in reading.pieces if p.parameter})
    report(
        rounds=rounds, flipped=flipped, mended=mended, read=read, nbytes=reading.nbytes, link_bytes=reading.link_bytes,
        flipped_source=piece.source, flipped_tensor=reading.targets[piece.target].name,
        targets={t.name: list(t.shape) for t in reading.targets},
    )  # fmt: skip
    rollout.close()
    mesh.close()


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
