"""The training loop. Every rank runs it; C marks what all ranks enter together, 0 what rank 0 alone decides."""

from __future__ import annotations

import functools
import sys
import time

from megaflow.algo.kl import kl_estimate
from megaflow.algo.losses import objective
from megaflow.algo.mismatch import mismatch_per_token
from megaflow.checkpoint.directory import find
from megaflow.checkpoint.loading import load
from megaflow.checkpoint.saving import save
from megaflow.config.schema import Config
from megaflow.data.packing import split_balanced
from megaflow.parallel import device
from megaflow.parallel.mesh import Mesh
from megaflow.trainer.build import Parts, build
from megaflow.trainer.evaluate import evaluate
from megaflow.trainer.export import export_hf
from megaflow.trainer.logic import apply_decisions, make_batch
from megaflow.trainer.run import Run
from megaflow.types import Sample


def train(cfg: Config) -> None:
    """Collective. Train as configured; ends the process with the run's exit code (docs/running.md)."""
    if cfg.run.deterministic:
        device.make_deterministic()
    device.seed_everything(cfg.run.seed)
    mesh = Mesh.create(cfg.parallel, cfg.rollout.tp, cfg.run.timeout_s)
    with Run.open(cfg, mesh, find) as run:
        parts = build(cfg, mesh)
        data, actor, rollout = parts.data, parts.actor, parts.rollout
        resume(run, parts)
        if run.resume_step == 0 and run.due("eval", 0):
            run.log(0, evaluate(run, parts, 0))  # C
        for step in run.steps():
            with run.phase("sync"):
                stats = parts.sync(step - 1)  # C  actor -> engine, proven equal; then the actor sleeps
            with run.phase("rollout"):
                start = time.perf_counter()
                samples = rollout.generate(data.next(), cfg.sampling, (cfg.run.seed, step), cfg.rollout.samples_per_prompt, step - 1)  # C
                seconds = time.perf_counter() - start
                rollout.sleep(int(cfg.rollout.sleep_level))  # C  KV cache and weights go back to the device
            stats["mem/after_sleep_gb"] = run.memory_gb()
            with run.phase("logprob"):
                actor.wake()  # C
                samples = mesh.scatter(samples, split_balanced)  # C
                add_logprobs(parts, samples)  # C
            with run.phase("logic"):
                gathered = mesh.gather(samples)  # C  one row a sequence; token tensors stay where they are
                batch = mesh.on_rank0(make_batch, gathered, parts.rewards, cfg)  # 0
                samples = mesh.scatter(apply_decisions(samples, batch), split_balanced)  # C
            with run.phase("update"):
                stats |= actor.update(samples, objective, cfg.algo)  # C
            stats |= batch.stats | {"rollout/tokens_per_s": batch.stats["rollout/tokens"] / seconds}
            if data.exhausted:
                run.end_after(step)
            if run.due("eval", step):
                stats |= evaluate(run, parts, step)  # C
            run.log(step, stats)
            run.write_samples(step, gathered)
            if run.due("save", step):
                state = {"trainable": actor, "mesh": mesh, "extra": {"data": data.state_dict()}, "keep_last": cfg.run.keep_last}
                run.save(step, functools.partial(save, **state))  # C  atomic
        if cfg.run.export_hf and run.step >= run.steps_total:
            export_hf(actor, cfg, mesh, run.directory / "hf")  # C
        parts.close()
        code = run.finish()
    mesh.close()
    sys.exit(code)


def add_logprobs(parts: Parts, samples: list[Sample]) -> None:
    """Collective. The trainer's and the reference's log-probabilities, and per-sequence sums for rank 0."""
    old = parts.actor.logprobs(samples)
    ref = parts.actor.logprobs_of(parts.ref, samples) if parts.ref is not None else [None] * len(samples)
    estimator = parts.actor.algo.kl.estimator
    for s, old_logp, ref_logp in zip(samples, old, ref, strict=True):
        s.old_logp, s.ref_logp = old_logp, ref_logp
        s.sums = {f"mismatch/{n}": float(v.double().sum()) for n, v in mismatch_per_token(old_logp, s.rollout_logp).items()}
        if ref_logp is not None:
            s.sums["ref_kl"] = float(kl_estimate(old_logp, ref_logp, estimator).double().sum())


def resume(run: Run, parts: Parts) -> None:
    """Collective. Take over the state of the checkpoint that the run found, if any."""
    if run.resume_checkpoint is not None:
        extra = load(run.resume_checkpoint, parts.actor, run.mesh)
        parts.data.load_state_dict(extra["data"])
