"""Held-out accuracy: during training, and of a model or checkpoint by itself."""

from __future__ import annotations

import dataclasses
import json
import time
from pathlib import Path

from megaflow.checkpoint.directory import find
from megaflow.checkpoint.loading import load
from megaflow.config.schema import Config
from megaflow.monitor.metrics import replace_text
from megaflow.parallel import device
from megaflow.parallel.mesh import Mesh
from megaflow.trainer.build import Parts, build
from megaflow.trainer.logic import accuracy
from megaflow.trainer.run import Run
from megaflow.trainer.samples import write_samples
from megaflow.types import ConfigError, Sample, Stats


def evaluate(run: Run, parts: Parts, step: int) -> Stats:
    """Collective. eval/<set>/accuracy and eval/<set>/reward of the present policy. Empty without eval sets."""
    if not parts.data.eval_sets:
        return {}
    with run.phase("eval"):
        stats = {}
        for name, samples in generate_sets(run.cfg, run.mesh, parts, step).items():
            right, reward = run.mesh.on_rank0(accuracy, samples, parts.rewards)  # 0
            stats |= {f"eval/{name}/accuracy": right, f"eval/{name}/reward": reward}
        return stats


def generate_sets(cfg: Config, mesh: Mesh, parts: Parts, step: int) -> dict[str, list[Sample]]:
    """Collective. Answers to every eval set, on rank 0; leaves the engine asleep and the actor awake."""
    parts.sync(step)
    sampling = dataclasses.replace(cfg.sampling, temperature=cfg.eval.temperature)
    answers = {}
    for name, prompts in parts.data.eval_sets.items():
        mine = parts.rollout.generate(prompts, sampling, (cfg.run.seed, -1), cfg.eval.samples, step)
        answers[name] = mesh.gather_from_engines(mine)
    parts.rollout.sleep(int(cfg.rollout.sleep_level))
    parts.actor.wake()
    return answers


def evaluate_run(cfg: Config) -> None:
    """Collective. Measure model.path, or the checkpoint that run.resume names, on data.eval; prints and keeps the result.

    Writes <run>/eval.json and <run>/samples/eval_<set>.jsonl; leaves everything else in the run directory alone.
    """
    device.seed_everything(cfg.run.seed)
    mesh = Mesh.create(cfg.parallel, cfg.rollout.tp, cfg.run.timeout_s)
    parts = build(cfg, mesh)
    if not parts.data.eval_sets:
        raise ConfigError("nothing to evaluate: data.eval is empty and data.eval_fraction is 0")
    step = _load_checkpoint(cfg, mesh, parts)
    directory = Path(cfg.run.root) / cfg.run.name
    results = {}
    for name, samples in generate_sets(cfg, mesh, parts, step).items():
        right, reward = mesh.on_rank0(accuracy, samples, parts.rewards)
        prompts = len(parts.data.eval_sets[name])
        results[name] = {"accuracy": right, "reward": reward, "prompts": prompts, "samples": cfg.eval.samples}
        if mesh.rank == 0:
            print(f"{name}: accuracy {right:.4f}, reward {reward:.4f} ({prompts} prompts x {cfg.eval.samples})", flush=True)
            _keep_samples(directory, name, samples)
    if mesh.rank == 0:
        record = {"model": cfg.model.path, "step": step, "time": time.time(), "temperature": cfg.eval.temperature, "sets": results}
        replace_text(directory / "eval.json", json.dumps(record, indent=2))
        print(f"written: {directory / 'eval.json'}", flush=True)
    parts.close()
    mesh.close()


def _load_checkpoint(cfg: Config, mesh: Mesh, parts: Parts) -> int:
    """Its step; 0 for the model folder itself."""
    if cfg.run.resume in ("auto", "never"):
        return 0
    found = find(Path(cfg.run.resume))
    if found is None:
        raise ConfigError(f"run.resume={cfg.run.resume}: there is no complete checkpoint there")
    load(found[1], parts.actor, mesh)
    return found[0]


def _keep_samples(directory: Path, name: str, samples: list[Sample]) -> None:
    (directory / "samples").mkdir(parents=True, exist_ok=True)
    write_samples(directory / "samples", 0, samples, -1).rename(directory / "samples" / f"eval_{name}.jsonl")
