"""Values of a critic and two of its optimizer steps on given samples, under one layout after another: MODEL OUT TPxPP[+sp]:PORT:SCORER ...

SCORER is the folder of a reward model, which scores the same samples on the same ranks.

Each layout has a forked process of its own, since process groups cannot be made anew within one, and importing takes longer than all else.

OUT/<layout>.safetensors gets the gradients of the first step and the final weights, by Hugging Face name.
"""

from __future__ import annotations

import dataclasses
import json
import os
import sys
import traceback
from pathlib import Path
from types import SimpleNamespace

import torch
from safetensors.torch import save_file

from megaflow.checkpoint.directory import Retention, find
from megaflow.checkpoint.loading import load
from megaflow.checkpoint.saving import Content, save
from megaflow.config.schema import CriticConfig, RewardConfig, RewardModelConfig
from megaflow.data import load_tokenizer
from megaflow.data.packing import split_balanced
from megaflow.parallel.mesh import Mesh
from megaflow.trainer.build import build_actor
from megaflow.trainer.critic import build_critic
from megaflow.trainer.export import full_tensors
from megaflow.trainer.mesh_scorer import build_reward_model
from tests import tiny
from tests.ranks import report


def configuration(model: str, layout: str):
    tp, pp = map(int, layout.removesuffix("+sp").split("x"))
    cfg = tiny.config(model, tp, pp, actor={"micro_batch_tokens": 64}, algo=tiny.AlgoConfig(advantage="gae"))
    critic = CriticConfig(lr=1e-3, clip_grad=0.0, clip_value=0.1)
    return dataclasses.replace(cfg, critic=critic, parallel=dataclasses.replace(cfg.parallel, sp=layout.endswith("+sp")))


def with_targets(samples, values):
    """Old values near `values` and returns, so that some errors are clipped; the same noise for a sample wherever it lies."""
    for s, v in zip(samples, values, strict=True):
        g = torch.Generator().manual_seed(s.group * 100 + s.index)
        s.values = v + 0.2 * torch.randn(len(v), generator=g)
        s.returns = torch.randn(len(v), generator=g)
    return samples


def scores_of(folder: str, cfg, mesh) -> list[float]:
    """Of samples that all lie on rank 0, as if its engine had made them."""
    cfg = dataclasses.replace(cfg, reward=RewardConfig(model=RewardModelConfig(path=folder)))
    scorer = build_reward_model(cfg, mesh, load_tokenizer(folder))
    made = tiny.samples(24, scorer.model.shape.vocab_size)
    scorer.score(made if mesh.rank == 0 else [])
    return [s.sums["reward_model"] for s in made] if mesh.rank == 0 else []


def step(layout: str, model: str, scorer: str, out: Path) -> dict:
    cfg = configuration(model, layout)
    mesh = Mesh.create(cfg.parallel)
    critic = build_critic(cfg, mesh, 8)
    critic.wake()
    made = tiny.samples(24, critic.shape.vocab_size)
    for i, s in enumerate(made):
        s.mini_batch = i // 12
    mine = mesh.scatter(made if mesh.rank == 0 else [], split_balanced)
    values, last = critic.values(mine)
    with_targets(mine, values)
    first = critic.update([s for s in mine if s.mini_batch == 0])
    tensors = {f"gradient.{n}": t for n, t in whole(critic, cfg, mesh, lambda p: p.main_grad)}
    second = critic.update([s for s in mine if s.mini_batch == 1])
    tensors |= {f"weight.{n}": t for n, t in whole(critic, cfg, mesh, lambda p: p)}
    if mesh.rank == 0:
        save_file(tensors, out / f"{layout}.safetensors")
    found = {f"{s.group}.{s.index}": [*v.tolist(), after] for s, v, after in zip(mine, values, last, strict=True)}
    saved = from_checkpoint(cfg, mesh, critic, mine, out / "checkpoints")
    scores = scores_of(scorer, cfg, mesh)
    mesh.close()
    return {"scores": scores, "saved": saved, "values": found, "first": first, "second": second}


def from_checkpoint(cfg, mesh, critic, mine, directory: Path) -> list[dict]:
    """Two more steps: of the critic that the first layout saves here beside a policy, and of what every later layout loads."""
    actor = build_actor(cfg, mesh)
    found = mesh.on_rank0(find, directory)
    if found is None:
        save(directory, Content(1, actor, {}, critic), mesh, Retention(1))
    else:
        load(found[1], actor, mesh, critic)
    critic.wake()
    return [critic.update([s for s in mine if s.mini_batch == number]) for number in (0, 1)]


def whole(critic, cfg, mesh, part) -> list:
    """(Hugging Face name, what `part` takes of the parameter), whole, on every rank; the head is the last stage's."""
    mine = {n: part(p).detach() for n, p in critic.parameters.items()}
    body = SimpleNamespace(shape=dataclasses.replace(critic.shape, tied=True), parameters=mine, device=critic.device)
    heads = mesh.all_gather({n.replace("output_layer", "score"): t for n, t in mine.items() if n.startswith("output_layer.")})
    return [(n, t.clone()) for n, t in full_tensors(body, cfg, mesh)] + [(n, t.clone()) for n, t in heads[-1].items()]


def in_own_process(argument: str, model: str, out: Path) -> dict:
    """What `step` finds. The rendezvous of rank 0 is at PORT, not at the launcher's."""
    layout, port, scorer = argument.split(":")
    file = out / f"{layout}.{os.environ['RANK']}.json"
    child = os.fork()
    if child == 0:
        os.environ.pop("TORCHELASTIC_USE_AGENT_STORE", None)
        os.environ["MASTER_PORT"] = port
        try:
            file.write_text(json.dumps(step(layout, model, scorer, out)))
        except BaseException:
            traceback.print_exc()
        os._exit(0 if file.exists() else 1)
    _, status = os.waitpid(child, 0)
    assert status == 0, f"{layout} ended with status {status}"
    return json.loads(file.read_text())


if __name__ == "__main__":
    torch.set_num_threads(1)
    report(**{argument.partition(":")[0]: in_own_process(argument, sys.argv[1], Path(sys.argv[2])) for argument in sys.argv[3:]})
