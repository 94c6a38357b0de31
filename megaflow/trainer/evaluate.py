"""Held-out accuracy: during training, and of a model or checkpoint by itself."""

from __future__ import annotations

import dataclasses
import json
import time
from pathlib import Path

from megaflow.algo.best_of import majority_solved, pass_probability
from megaflow.checkpoint.directory import find
from megaflow.checkpoint.loading import load
from megaflow.config.schema import Config
from megaflow.monitor import progress
from megaflow.monitor.metrics import replace_text
from megaflow.parallel import device
from megaflow.parallel.mesh import Mesh
from megaflow.rewards import RewardPool
from megaflow.trainer.build import Parts, build
from megaflow.trainer.run import Run
from megaflow.trainer.samples import write_samples
from megaflow.trainer.scoring import is_solved
from megaflow.trainer.watched import watched
from megaflow.types import ConfigError, Sample, Stats


def evaluate(run: Run, parts: Parts, step: int) -> Stats:
    """Collective. eval/<set>/* of the present policy (see `measure`). Empty without eval sets."""
    if not parts.data.eval_sets:
        return {}
    with run.phase("eval"):
        stats = {}
        for name, samples in generate_sets(run.cfg, run.mesh, parts, step).items():
            measured = run.mesh.on_rank0(measure, samples, parts.rewards, run.cfg)  # 0
            stats |= {f"eval/{name}/{figure}": value for figure, value in measured.items()}
        return stats


def generate_sets(cfg: Config, mesh: Mesh, parts: Parts, step: int) -> dict[str, list[Sample]]:
    """Collective. Answers to every eval set, on rank 0; leaves the engine asleep and the actor awake."""
    parts.sync(step)
    sampling = dataclasses.replace(cfg.sampling, temperature=cfg.eval.temperature)
    answers = {}
    for name, prompts in parts.data.eval_sets.items():
        mine = parts.rollout.generate(prompts, sampling, (cfg.run.seed, -1), cfg.eval.samples, step)
        if parts.reward_model is not None:
            parts.reward_model.score(mine)
        answers[name] = mesh.gather_from_engines(mine)
    parts.rollout.sleep(int(cfg.rollout.sleep_level))
    parts.actor.wake()
    return answers


def measure(samples: list[Sample], rewards: RewardPool, cfg: Config) -> Stats:
    """Of one set, with n = eval.samples to each prompt: accuracy (mean of the first reward function), reward; for n > 1 also

    pass@k   the unbiased probability that k samples hold a solved one, mean over prompts
    avg@n    part of the samples that are solved; that is pass@1
    maj@n    part of the prompts whose most frequent answer is right; only where the first function can tell answers apart

    A sample is solved when the first function gives at least reward.solved. Runs on rank 0; samples in (group, index) order.
    """
    n = cfg.eval.samples
    scored = rewards.score(samples, with_answers=n > 1)
    first = [next(iter(each.parts.values())) if each.parts else 0.0 for each in scored]
    found = {"accuracy": sum(first) / len(first), "reward": sum(each.reward for each in scored) / len(scored)}
    if n == 1:
        return found
    solved = [is_solved(sample, cfg) for sample in samples]
    groups = [range(start, start + n) for start in range(0, len(samples), n)]
    for k in cfg.eval.pass_k or [2**i for i in range(n.bit_length())]:
        found[f"pass@{k}"] = sum(pass_probability(n, sum(solved[i] for i in group), k) for group in groups) / len(groups)
    found[f"avg@{n}"] = sum(solved) / len(solved)
    if rewards.tells_answers:
        votes = [majority_solved([scored[i].answer for i in group], [solved[i] for i in group]) for group in groups]
        found[f"maj@{n}"] = sum(votes) / len(votes)
    return found


def evaluate_run(cfg: Config) -> None:
    """Collective. Measure model.path, or the checkpoint that run.resume names, on data.eval; prints and keeps the result.

    Writes <run>/eval.json and <run>/samples/eval_<set>.jsonl; leaves everything else in the run directory alone.
    """
    device.seed_everything(cfg.run.seed)
    mesh = Mesh.create(cfg.parallel, cfg.rollout.tp, cfg.run.timeout_s)
    directory = Path(cfg.run.root) / cfg.run.name
    with watched(cfg, mesh, directory):
        parts = build(cfg, mesh, with_engine=True)
        if not parts.data.eval_sets:
            raise ConfigError("nothing to evaluate: data.eval is empty and data.eval_fraction is 0")
        step = load_checkpoint(cfg, mesh, parts)
        with progress.phase("eval", step):
            results = measure_sets(cfg, mesh, parts, step, directory)
        if mesh.rank == 0:
            record = {"model": cfg.model.path, "step": step, "time": time.time(), "temperature": cfg.eval.temperature, "sets": results}
            replace_text(directory / "eval.json", json.dumps(record, indent=2))
            print(f"written: {directory / 'eval.json'}", flush=True)
        parts.close()
    mesh.close()


def measure_sets(cfg: Config, mesh: Mesh, parts: Parts, step: int, directory: Path) -> dict[str, Stats]:
    """Collective. What `measure` finds of every eval set; rank 0 prints it and keeps the samples."""
    results = {}
    for name, samples in generate_sets(cfg, mesh, parts, step).items():
        measured = mesh.on_rank0(measure, samples, parts.rewards, cfg)
        prompts = len(parts.data.eval_sets[name])
        results[name] = {**measured, "prompts": prompts, "samples": cfg.eval.samples}
        if mesh.rank == 0:
            figures = ", ".join(f"{figure} {value:.4f}" for figure, value in measured.items())
            print(f"{name}: {figures} ({prompts} prompts x {cfg.eval.samples})", flush=True)
            _keep_samples(directory, name, samples)
    return results


def load_checkpoint(cfg: Config, mesh: Mesh, parts: Parts) -> int:
    """Collective. Load what run.resume names; its step, 0 for the model folder itself."""
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
