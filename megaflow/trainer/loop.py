"""The training loop. Every rank runs it; C marks what all ranks enter together, 0 what rank 0 alone decides."""

from __future__ import annotations

import sys

from megaflow.algo.kl import kl_estimate
from megaflow.algo.losses import objective
from megaflow.algo.mismatch import mismatch_of_sequence
from megaflow.checkpoint.directory import find
from megaflow.config.schema import Config
from megaflow.parallel import device
from megaflow.parallel.mesh import Mesh
from megaflow.trainer.build import Parts, build
from megaflow.trainer.critic import add_values, update_critic
from megaflow.trainer.evaluate import evaluate
from megaflow.trainer.export import export_hf
from megaflow.trainer.last_resort import saved_if_lost
from megaflow.trainer.logic import apply_decisions, make_batch
from megaflow.trainer.marking import mark_tokens
from megaflow.trainer.offline import learn_offline
from megaflow.trainer.run import Run
from megaflow.trainer.supervisor import Supervisor
from megaflow.types import Sample


def train(cfg: Config) -> None:
    """Collective. Train as configured; ends the process with the run's exit code (docs/running.md)."""
    if cfg.run.deterministic:
        device.make_deterministic()
    device.seed_everything(cfg.run.seed)
    mesh = Mesh.create(cfg.parallel, cfg.rollout.tp, cfg.run.timeout_s)
    with Run.open(cfg, mesh, find) as run:
        parts = build(cfg, mesh, with_critic=True)
        run.startup = parts.startup
        data, actor, critic, rollout = parts.data, parts.actor, parts.critic, parts.rollout
        supervisor = Supervisor.begin(cfg, run, parts)  # C  goes on from the checkpoint that the run found
        if run.resume_checkpoint is None and run.due("eval", 0):
            run.log(0, evaluate(run, parts, 0))  # C
        learn_offline(run, parts, add_logprobs, supervisor.end_step)  # C  steps 1 to offline.steps, from stored data
        for step in run.steps():
            with saved_if_lost(supervisor, step):  # C
                with run.phase("sync"):
                    stats = parts.sync(step - 1)  # C  actor -> engine, proven equal; then the actor sleeps
                draw = parts.sampler.begin(step)
                while draw.wants_more:  # once, unless algo.dynamic replaces groups without a signal
                    with run.phase("rollout"):
                        samples = draw.generate()  # C
                    with run.phase("reward"):
                        draw.judge(samples)  # C
                with run.phase("rollout"):
                    rollout.sleep(int(cfg.rollout.sleep_level))  # C  KV cache and weights go back to the device
            stats |= parts.restarts.drain()
            stats["mem/after_sleep_gb"] = run.memory_gb()
            with run.phase("logprob"):
                actor.wake()  # C
                samples = mesh.scatter(draw.finish(), actor.cost.balanced)  # C
                add_logprobs(parts, samples)  # C
                stats |= actor.route_stats()  # C
                if critic is not None:
                    add_values(critic, samples)  # C
            with run.phase("logic"):
                gathered = mesh.gather(samples, parts.needs_tokens)  # C  one row a sequence; token tensors only for those who read them
                batch = mesh.on_rank0(make_batch, gathered, supervisor.settings)  # 0
                samples = mesh.scatter(apply_decisions(samples, batch), actor.cost.balanced)  # C
            with run.phase("update"):
                if critic is not None:
                    stats |= supervisor.guards.watched(update_critic, critic, samples)  # C
                if critic is None or step > cfg.critic.warmup_steps:
                    mark_tokens(mesh, samples, cfg.algo, (cfg.run.seed, step))  # C  for losses that choose among all tokens
                    stats |= supervisor.guards.watched(actor.update, samples, objective, supervisor.settings.algo)  # C
            stats |= batch.stats | draw.stats | data.stats()
            if supervisor.hold(step, stats, samples, gathered):  # C  past a limit, and back at a checkpoint
                learn_offline(run, parts, add_logprobs, supervisor.end_step)  # C  what is left of it, if the checkpoint lies there
                continue
            if data.exhausted:
                run.end_after(step)
            if run.due("eval", step):
                stats |= evaluate(run, parts, step)  # C
            run.log(step, stats)
            run.write_samples(step, gathered)
            supervisor.end_step(step, stats)  # C  a checkpoint if one is due, written while the next steps are made
        supervisor.settle()  # C  the last one is whole
        if cfg.run.export_hf and run.step >= run.steps_total:
            export_hf(actor, cfg, mesh, run.directory / "hf")  # C
        parts.close()
        code = run.finish()
    mesh.close()
    sys.exit(code)


def add_logprobs(parts: Parts, samples: list[Sample]) -> None:
    """Collective. The trainer's and the reference's log-probabilities, and per-sequence sums for rank 0."""
    algo = parts.actor.algo
    is_measured = algo.old_logp == "recompute"
    old = parts.actor.logprobs(samples) if is_measured else [s.rollout_logp for s in samples]
    ref = parts.actor.logprobs_of(parts.ref, samples) if parts.ref is not None else [None] * len(samples)
    for s, old_logp, ref_logp in zip(samples, old, ref, strict=True):
        s.old_logp, s.ref_logp = old_logp, ref_logp
        s.sums = mismatch_of_sequence(old_logp, s.rollout_logp, algo.correction) if is_measured else {}
        if ref_logp is not None:
            s.sums["ref_kl"] = float(kl_estimate(old_logp, ref_logp, algo.kl.estimator).double().sum())
