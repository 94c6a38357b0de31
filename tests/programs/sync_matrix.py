"""Two rounds of sync, generation and update for a layout, then a flipped value: MODEL TP PP ROLLOUT_TP [EP ROLLOUT_EP]. Reports what each
rank saw.

The first round pulls, the second goes in buckets, and each has its flipped value: one engine serves for both transports.
"""

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
from tests.ranks import report

TRANSPORTS = ("auto", "buckets")  # auto is a pull on one host


def main() -> None:
    model, tp, pp, rollout_tp = sys.argv[1], *map(int, sys.argv[2:5])
    ep, rollout_ep = map(int, sys.argv[5:7] or (1, 1))
    cfg = tiny.config(model, tp, pp, rollout_tp)
    cfg = dataclasses.replace(cfg, parallel=dataclasses.replace(cfg.parallel, ep=ep))
    cfg = dataclasses.replace(cfg, rollout=dataclasses.replace(cfg.rollout, ep=rollout_ep))
    mesh = Mesh.create(cfg.parallel, rollout_tp)
    actor = build_actor(cfg, mesh)
    tokenizer = load_tokenizer(model)
    rollout = BACKENDS.get("sglang")(cfg, mesh, tokenizer, stop_token_ids(model, tokenizer))
    syncs = [Sync(dataclasses.replace(cfg, sync=dataclasses.replace(cfg.sync, transport=t)), mesh, actor, rollout) for t in TRANSPORTS]
    asked = tiny.prompts(8, actor.shape.vocab_size)
    rounds = []
    for version in range(2):
        stats = syncs[version](version)
        samples = rollout.generate(asked, cfg.sampling, (0, version), 4, version)
        rollout.sleep(2)
        actor.wake()
        weights = {n: t.clone() for n, t in full_tensors(actor, cfg, mesh)}
        worst = against_transformers(model, weights, samples) if mesh.rank == 0 else (0.0, 0.0)
        samples = mesh.scatter(samples, split_balanced)
        differences = []
        for s, logp in zip(samples, actor.logprobs(samples), strict=True):
            differences.append((logp - s.rollout_logp).abs())
            s.old_logp, s.advantage = logp, (-1.0) ** s.index
        update = actor.update(samples, objective, cfg.algo)
        trainer = largest_and_mean(differences)
        rounds.append({"stats": stats, "transformers": worst, "trainer": trainer, "update": update, "samples": len(samples)})
    pull, buckets = (s.source for s in syncs)
    pull.flip, buckets.flip = len(pull.reading.pieces) - 1, len(buckets.plan.buckets) - 1
    flipped = [error_of(lambda s=s: s(2)) for s in syncs]
    pull.flip = -1
    mended = error_of(lambda: syncs[0](2))
    last = pull.reading.pieces[-1]._asdict()
    report(rounds=rounds, flipped=flipped, mended=mended, mode=buckets.plan.mode, buckets=len(buckets.plan.buckets), last=last)
    rollout.close()
    mesh.close()


def error_of(action) -> str:
    try:
        action()
    except Exception as e:
        return f"{type(e).__name__}: {e}"
    return ""


def largest_and_mean(differences: list[torch.Tensor]) -> tuple[float, float]:
    return torch.cat(differences).max().item(), torch.cat(differences).mean().item()


def against_transformers(model: str, weights: dict[str, torch.Tensor], samples) -> tuple[float, float]:
    """Largest and mean difference of the engine's log-probabilities from those of transformers (fp32, CPU) with the trainer's weights."""
    from transformers import AutoModelForCausalLM

    reference = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    named = published_tensors(reference.state_dict(), read_shape(model))
    for name, t in weights.items():
        named[name].data.copy_(t)
    differences = []
    for s in samples:
        tokens = torch.tensor([s.prompt.tokens + s.response.tolist()])
        with torch.no_grad():
            logp = reference(tokens).logits[0, len(s.prompt.tokens) - 1 : -1].log_softmax(-1)
        differences.append((logp.gather(1, s.response[:, None])[:, 0] - s.rollout_logp).abs())
    return largest_and_mean(differences)


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
