"""Train tiny actors for some steps, from a checkpoint or not, and report what each is at the end.

    checkpoint_train.py TP PP '[{"model": PATH, "load": PATH, "steps": 2, "save": DIRECTORY, ...}, ...]'
"""

from __future__ import annotations

import contextlib
import json
import logging
import random
import resource
import shutil
import sys
import threading
import time
import unittest.mock
import zlib
from pathlib import Path

import numpy as np
import torch

from megaflow.config.schema import ActorConfig, Config, ModelConfig, ParallelConfig
from megaflow.parallel import device
from megaflow.parallel.mesh import Mesh
from megaflow.types import Prompt, Sample, UserError
from tests.ranks import report

JOB = {
    "dtype": "float32", "distributed": True, "total": 8, "lr": 1e-3, "seed": 1000,
    "load": None, "steps": 2, "save": None, "first_step": 0, "limit_bytes": 0, "free_bytes": None, "unmended": None,
    "experts": "auto", "async": False, "vanish": False, "away": False,
}  # fmt: skip
KEYS = ("param", "exp_avg", "exp_avg_sq", "step")


def main() -> None:
    records = Records()
    axes = {"tp": int(sys.argv[1]), "pp": int(sys.argv[2]), **json.loads(sys.argv[4] if len(sys.argv) > 4 else "{}")}
    found = work(axes, json.loads(sys.argv[3]))
    report(jobs=found, log=records.texts)


def work(axes: dict[str, int], jobs: list[dict]) -> list[dict]:
    """On each of the ranks of one layout."""
    parallel = ParallelConfig(**axes)
    mesh = Mesh.create(parallel)
    found = []
    for given in jobs:
        job = {**JOB, **given}
        device.seed_everything(job["seed"] + mesh.rank)
        with without(job["unmended"]):
            found.append(run(make_actor(job, parallel, mesh), mesh, job))
    mesh.close()
    return found


def without(name: str | None):
    """Leave one of our mends of Megatron out."""
    from megaflow.checkpoint import mends

    return unittest.mock.patch.object(mends, name, lambda *_: contextlib.nullcontext()) if name else contextlib.nullcontext()


class Records(logging.Handler):
    def __init__(self):
        super().__init__(logging.INFO)
        self.addFilter(lambda record: not record.name.startswith("megaflow.actor"))  # which kernels it takes
        self.texts: list[str] = []
        logging.getLogger("megaflow").setLevel(logging.INFO)
        logging.getLogger("megaflow").addHandler(self)

    def emit(self, record) -> None:
        self.texts.append(record.getMessage())


def make_actor(job: dict, parallel: ParallelConfig, mesh: Mesh):
    from megaflow.actor.actor import Actor
    from megaflow.shape import read_shape
    from megaflow.weights import folder

    settings = ActorConfig(
        lr=job["lr"], min_lr=1e-5, lr_decay="cosine", lr_warmup_steps=2, weight_decay=0.1,
        micro_batch_tokens=64, distributed_optimizer=job["distributed"],
    )  # fmt: skip
    cfg = Config(model=ModelConfig(path=job["model"], dtype=job["dtype"], experts=job["experts"]), parallel=parallel, actor=settings)
    shape = read_shape(job["model"])
    actor = Actor(shape, cfg, mesh, job["total"])
    folder.load(job["model"], shape, actor.parameters, mesh.tp.size, mesh.tp.index, mesh.etp.size, mesh.etp.index)
    actor.weights_changed()
    actor.algo = cfg.algo
    return actor


def run(actor, mesh: Mesh, job: dict) -> dict:
    from megaflow.checkpoint.directory import Retention
    from megaflow.checkpoint.loading import load
    from megaflow.checkpoint.saver import Saver
    from megaflow.checkpoint.saving import Content

    found: dict = {"lrs": [], "norms": [], "losses": []}
    start = time.perf_counter()
    if job["load"]:
        try:
            found["extra"] = load(Path(job["load"]), actor, mesh)
        except UserError as e:
            return {"error": str(e), "type": type(e).__name__}
    found["load_s"] = time.perf_counter() - start
    last = job["first_step"] + job["steps"]
    for step in range(job["first_step"] + 1, last + 1):
        stats = train_step(actor, mesh, step)
        found["lrs"].append(stats["train/lr"])
        found["norms"].append(stats["train/grad_norm"])
        found["losses"].append(stats["nll"])
    start = time.perf_counter()
    saver = Saver(mesh, Path(job["save"] or ""), Retention(2), in_background=job["async"])
    writer = HeldWriter() if job["async"] else contextlib.nullcontext()
    with writer:
        if job["save"]:
            actor.skipped_in_a_row = 1
            extra = {"cursor": last, "text": "é"}
            found["error"] = try_to_save(lambda: saver.save(Content(last, actor, extra)), mesh, job)
        found["save_s"] = time.perf_counter() - start
        draws = [random.random(), float(np.random.rand()), float(torch.rand(()))]
        found |= {"draws": draws, "skipped": actor.skipped_in_a_row, "next_lr": actor.optimizer.param_groups[0]["lr"]}
        found["state"] = digests(actor)
        if job["async"] and not found["error"]:
            found |= goes_on_meanwhile(actor, mesh, saver, writer, job, last)
    return found


class HeldWriter:
    """Background threads begin to write only when they are let."""

    def __init__(self):
        from megaflow.checkpoint import saving

        self.go = threading.Event()
        write = saving.Writing.write
        self.patch = unittest.mock.patch.object(saving.Writing, "write", lambda writing: (self.go.wait(), write(writing)))

    def __enter__(self):
        self.patch.start()
        return self

    def __exit__(self, *_) -> None:
        self.go.set()
        self.patch.stop()


def goes_on_meanwhile(actor, mesh: Mesh, saver, writer: HeldWriter, job: dict, step: int) -> dict:
    """The state changes, and everything that a checkpoint holds with it, before a byte of it is written."""
    train_step(actor, mesh, step + 1)
    actor.skipped_in_a_row = 7
    early = [str(each.path) for each in saver.poll()]
    if job["vanish"] and mesh.rank == 0:
        for part in Path(job["save"]).glob("*.part"):
            shutil.rmtree(part)
    mesh.barrier()
    error = try_to_save(lambda: (writer.go.set(), saver.settle()), mesh, job)
    mesh.barrier()
    left = sorted(p.name for p in Path(job["save"]).iterdir())
    return {"early": early, "error": error, "then": [str(each) for each in saver.settle()], "left": left}


def try_to_save(save, mesh: Mesh, job: dict) -> str | None:
    """The message of the error; the disk has `free_bytes`, and a file of the last rank may have at most `limit_bytes`, if given."""
    if job["limit_bytes"] and mesh.rank == mesh.world_size - 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (job["limit_bytes"], resource.RLIM_INFINITY))
    usage = shutil.disk_usage("/") if job["free_bytes"] is None else shutil.disk_usage("/")._replace(free=job["free_bytes"])
    try:
        away = goes_away(mesh, job) if job["away"] else contextlib.nullcontext()
        with unittest.mock.patch("shutil.disk_usage", lambda _: usage), away:
            save()
    except UserError as e:
        return str(e)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    return None


@contextlib.contextmanager
def goes_away(mesh: Mesh, job: dict):
    """The folder's file system, from the look at its free space until the save is over. Fails if something was made in its place."""
    from megaflow.checkpoint import saving

    place, elsewhere, look = Path(job["save"]), Path(f"{job['save']}-away"), saving._check_space

    def look_and_go(*arguments) -> None:  # on rank 0
        look(*arguments)
        place.rename(elsewhere)

    with unittest.mock.patch.object(saving, "_check_space", look_and_go):
        try:
            yield
        finally:
            mesh.barrier()
            if mesh.rank == 0:
                assert not place.exists(), f"made in its place: {sorted(place.rglob('*'))}"
                elsewhere.rename(place)
            mesh.barrier()


def train_step(actor, mesh: Mesh, step: int, scale: float = 1.0) -> dict:
    """Samples are a function of the step; the same in every layout. scale: of the advantages."""
    from megaflow.algo.losses import objective
    from megaflow.data.packing import split_balanced

    g = torch.Generator().manual_seed(step)
    samples = []
    for i in range(8):
        prompt = torch.randint(0, actor.shape.vocab_size, (3 + i % 5,), generator=g).tolist()
        response = torch.randint(0, actor.shape.vocab_size, (2 + (i * 7) % 9,), generator=g)
        sample = Sample(Prompt(f"x:{i}", prompt, ""), i // 4, i % 4, response, None, "stop", 0)
        sample.advantage = scale * float((-1) ** i) * (1 + i % 3)
        samples.append(sample)
    mine = mesh.scatter(samples if mesh.rank == 0 else [], split_balanced)
    for sample, logp in zip(mine, actor.logprobs(mine), strict=True):
        sample.old_logp = sample.rollout_logp = logp
    sums = mesh.sum({"logp": sum(float(s.old_logp.double().sum()) for s in mine), "tokens": sum(s.num_response for s in mine)})
    return actor.update(mine, objective, actor.algo) | {"nll": -sums["logp"] / sums["tokens"]}


def optimizer_state(actor):
    """(name, tensor) of all that Adam holds on this rank, main parameters included."""
    from megaflow.actor.optimizer import torch_optimizers

    for o, adam in enumerate(torch_optimizers(actor.optimizer)):
        for g, group in enumerate(adam.param_groups):
            for i, p in enumerate(group["params"]):
                values = {"param": p, **adam.state[p]}
                yield from ((f"{o}.{g}.{i}.{key}", values[key]) for key in KEYS)


def digests(actor) -> dict[str, str]:
    tensors = [*actor.parameters.items(), *optimizer_state(actor)]
    return {name: f"{t.dtype} {tuple(t.shape)} {zlib.crc32(t.detach().contiguous().view(torch.uint8).numpy().tobytes()):08x}"
            if t.dim() else f"{float(t)}" for name, t in tensors}  # fmt: skip


if __name__ == "__main__":
    main()
