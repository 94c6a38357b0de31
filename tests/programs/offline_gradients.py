"""The gradients of SFT and DPO on given samples, under two layouts: MODEL OUT.

OUT gets, for tp2 and dp2, <layout>_<objective>.safetensors by Hugging Face name and <layout>_<objective>.json, the metrics of the update.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import sys
from pathlib import Path
from types import SimpleNamespace

import torch
from safetensors.torch import save_file

from megaflow.config.schema import OfflineConfig
from megaflow.data.packing import split_balanced
from megaflow.parallel.mesh import Mesh
from megaflow.trainer.build import build_actor
from megaflow.trainer.export import full_tensors
from megaflow.trainer.offline import learn_dpo, learn_sft
from tests import tiny
from tests.programs import forked

PAIRS = 6
STRETCH = 1.03  # the policy's weights are the reference model's times this, so that margins are not 0
OFFLINE = OfflineConfig(steps=1, beta=0.3, label_smoothing=0.1)


def made(vocab: int) -> list:
    """Pairs of ragged responses; both of a pair answer the same prompt."""
    samples = tiny.samples(2 * PAIRS, vocab)
    for i, s in enumerate(samples):
        s.group, s.index, s.prompt, s.rollout_logp = i // 2, i % 2, samples[i - i % 2].prompt, None
    return samples


def work(model: str, out: Path, layout: str) -> None:
    torch.set_num_threads(1)
    tp = 2 if layout == "tp2" else 1
    # a distributed optimizer leaves each data-parallel rank only its own part of the summed gradients
    actor_settings = {"micro_batch_tokens": 40, "clip_grad": 0.0, "distributed_optimizer": tp > 1}
    cfg = dataclasses.replace(tiny.config(model, tp, actor=actor_settings), offline=OFFLINE)
    mesh = Mesh.create(cfg.parallel)
    actor = build_actor(cfg, mesh)
    parts = SimpleNamespace(actor=actor, preference_ref=actor.host_copy())
    run = SimpleNamespace(cfg=cfg, mesh=mesh, phase=lambda name: contextlib.nullcontext())
    for objective, learn in (("sft", learn_sft), ("dpo", learn_dpo)):
        with torch.no_grad():
            for name, p in actor.parameters.items():
                p.copy_(parts.preference_ref.tensors[name] * STRETCH)
        actor.weights_changed()
        samples = mesh.scatter(made(actor.shape.vocab_size) if mesh.rank == 0 else [], split_balanced)
        stats, _ = learn(run, parts, samples)
        gradients = gradients_of(actor, cfg, mesh)
        if mesh.rank == 0:
            save_file(gradients, out / f"{layout}_{objective}.safetensors")
            (out / f"{layout}_{objective}.json").write_text(json.dumps(stats))
    mesh.close()


def gradients_of(actor, cfg, mesh) -> dict[str, torch.Tensor]:
    weights, actor.parameters = actor.parameters, {n: p.main_grad for n, p in actor.parameters.items()}
    found = {n: t.clone() for n, t in full_tensors(actor, cfg, mesh)}
    actor.parameters = weights
    return found


def main() -> None:
    model, out = sys.argv[1], Path(sys.argv[2])
    for layout in ("tp2", "dp2"):
        codes = forked.wait(forked.start(2, lambda layout=layout: work(model, out, layout)))
        assert codes == [0, 0], (layout, codes)


if __name__ == "__main__":
    main()
