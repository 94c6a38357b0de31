"""Steps from stored data: off-policy RL, imitation, preferences. They come before the online steps of the same run, or fill it."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import torch

from megaflow.algo import ADVANTAGES
from megaflow.algo.losses import objective
from megaflow.algo.preference import preference_loss, sft, weighted_logp
from megaflow.config.schema import Config
from megaflow.data import load_tokenizer
from megaflow.data.stored import StoredSamples
from megaflow.trainer.build import Parts
from megaflow.trainer.evaluate import evaluate
from megaflow.trainer.logic import apply_decisions, make_batch
from megaflow.trainer.marking import mark_tokens
from megaflow.trainer.run import Run
from megaflow.trainer.scoring import score
from megaflow.types import ConfigError, Sample, Stats

AddLogprobs = Callable[[Parts, list[Sample]], None]
EndStep = Callable[[int, Stats], None]


def learn_offline(run: Run, parts: Parts, add_logprobs: AddLogprobs, end_step: EndStep) -> None:
    """Collective. Steps up to offline.steps, on data.rollouts; nothing when the run is past them. Leaves the actor awake.

    add_logprobs and end_step are the online loop's. Raises ConfigError when the data do not fit the objective.
    """
    if run.step < run.cfg.offline.steps:
        _learn(run, parts, add_logprobs, end_step)


def _learn(run: Run, parts: Parts, add_logprobs: AddLogprobs, end_step: EndStep) -> None:
    cfg = run.cfg
    store: list[StoredSamples] = []
    for notice in run.mesh.on_rank0(_open, cfg, store):
        run.say(notice)
    learn = {"rl": functools.partial(learn_rl, add_logprobs=add_logprobs), "sft": learn_sft, "dpo": learn_dpo}[cfg.offline.objective]
    if parts.rollout is not None:
        parts.rollout.sleep(int(cfg.rollout.sleep_level))  # C  from its start to the first sync it is awake
    for step in run.steps():
        samples = _take(cfg, store[0], step) if store else []
        stats = rewarded(run, parts, samples) if cfg.offline.objective == "rl" else {}  # C
        learned, rows = learn(run, parts, run.mesh.scatter(samples, parts.actor.cost.balanced))  # C
        stats |= learned
        stats |= run.mesh.on_rank0(_describe, cfg, store, step, rows)  # 0
        if run.due("eval", step):
            stats |= evaluate(run, parts, step)  # C
        run.log(step, stats)
        run.write_samples(step, rows)
        end_step(step, stats)  # C  a checkpoint, if one is due
        if step == cfg.offline.steps:
            return


# --- the three objectives: fn(run, parts, this rank's samples) -> (stats, on rank 0 all samples without their tokens) --------------


def rewarded(run: Run, parts: Parts, samples: list[Sample]) -> Stats:
    """Collective. Scores the samples, which are all on rank 0, by the present reward functions."""
    estimator = ADVANTAGES.get(run.cfg.algo.advantage)
    if parts.critic is not None or getattr(estimator, "needs_greedy", False):
        name = run.cfg.algo.advantage
        raise ConfigError(f"offline.objective=rl has no critic and no greedy answers, and algo.advantage={name} needs one; use e.g. grpo")
    with run.phase("reward"):
        _, counts = score(run.mesh, parts.rewards, samples, parts.reward_model)
    return {f"reward/{kind}": float(counts[kind]) for kind in ("failed", "timeout")}


def learn_rl(run: Run, parts: Parts, samples: list[Sample], add_logprobs: AddLogprobs) -> tuple[Stats, list[Sample]]:
    """Collective. As an online step, with stored samples in the place of a rollout; algo.correction weighs what has drifted."""
    with run.phase("logprob"):
        if any(run.mesh.all_gather(any(s.rollout_logp is None for s in samples))):
            for s, logp in zip(samples, parts.actor.logprobs(samples), strict=True):
                s.rollout_logp = logp if s.rollout_logp is None else s.rollout_logp
        add_logprobs(parts, samples)
    with run.phase("logic"):
        rows = run.mesh.gather(samples, parts.needs_tokens)
        batch = run.mesh.on_rank0(make_batch, rows, run.cfg)  # 0
        samples = run.mesh.scatter(apply_decisions(samples, batch), parts.actor.cost.balanced)
    with run.phase("update"):
        mark_tokens(run.mesh, samples, run.cfg.algo, (run.cfg.run.seed, run.step))
        return parts.actor.update(samples, objective, run.cfg.algo) | batch.stats, rows


def learn_sft(run: Run, parts: Parts, samples: list[Sample]) -> tuple[Stats, list[Sample]]:
    """Collective. The mean negative log-likelihood of the response tokens."""
    for s in samples:
        s.old_logp = s.rollout_logp = torch.zeros(s.num_response)  # columns that sft does not read
    with run.phase("update"):
        return parts.actor.update(samples, sft, run.cfg.algo), run.mesh.gather(samples)


def learn_dpo(run: Run, parts: Parts, samples: list[Sample]) -> tuple[Stats, list[Sample]]:
    """Collective. For each mini batch: every pair's margin from a forward pass, then one optimizer step weighted with its derivative."""
    actor, mesh, cfg = parts.actor, run.mesh, run.cfg
    with run.phase("logprob"):
        add_reference(parts, mesh, samples)
    algo = dataclasses.replace(cfg.algo, aggregation="sequence_sum")
    means: Stats = {}
    numbers = sorted({n for found in mesh.all_gather([s.mini_batch for s in samples]) for n in found})
    for number in numbers:
        mine = [s for s in samples if s.mini_batch == number]
        with run.phase("logprob"):
            for s, logp in zip(mine, actor.logprobs(mine), strict=True):
                s.old_logp = s.rollout_logp = logp
                s.sums["logp"] = float(logp.double().sum())
            weights, stats = mesh.on_rank0(preference_weights, mesh.gather(mine), cfg)  # 0
        for s in mine:
            s.advantage = weights[s.group, s.index]
        with run.phase("update"):
            stats = actor.update(mine, weighted_logp, algo) | stats
        means = {name: means.get(name, 0.0) + value / len(numbers) for name, value in stats.items()}
    means |= {name: means[name] * len(numbers) for name in ("train/optimizer_steps", "train/skipped")}
    return means, mesh.gather(samples)


def add_reference(parts: Parts, mesh: Any, samples: list[Sample]) -> None:
    """Collective. sums["ref_logp"] under the reference model of those samples that have it not from an earlier epoch."""
    new = [s for s in samples if "ref_logp" not in s.sums]
    if any(mesh.all_gather(bool(new))):
        for s, logp in zip(new, parts.actor.logprobs_of(parts.preference_ref, new), strict=True):
            s.sums["ref_logp"] = float(logp.double().sum())


def preference_weights(rows: list[Sample], cfg: Config) -> tuple[dict[tuple[int, int], float], Stats]:
    """From sums of whole pairs, in (group, index) order, to each sequence's weight and the step's figures. Runs on rank 0."""
    policy, ref = (torch.tensor([s.sums[n] for s in rows], dtype=torch.float64).view(-1, 2) for n in ("logp", "ref_logp"))  # [P, 2]
    gain = policy - ref
    margin = gain[:, 0] - gain[:, 1]
    loss, derivative = preference_loss(margin, cfg.offline)
    weights = torch.stack([-derivative, derivative], dim=1).flatten().tolist()
    stats = {
        "train/loss": float(loss.mean()),
        "dpo/margin": cfg.offline.beta * float(margin.mean()),
        "dpo/accuracy": float((margin > 0).double().mean()),
        "dpo/chosen_logp": float(policy[:, 0].mean()),
        "dpo/rejected_logp": float(policy[:, 1].mean()),
    }
    return {(s.group, s.index): weight for s, weight in zip(rows, weights, strict=True)}, stats


# --- rank 0 -----------------------------------------------------------------------------------------------------------------------


def _open(cfg: Config, store: list[StoredSamples]) -> list[str]:
    """Read the data into `store`; what a person should know of it. Raises ConfigError when it does not fit the objective."""
    place, wanted = cfg.data.rollouts, cfg.offline
    found = StoredSamples(place, wanted.objective, cfg.data, load_tokenizer(cfg.model.path), cfg.run.seed)
    store.append(found)
    notices = [f"offline: {wanted.objective}, {found.counts['lines']} lines of {place}, up to step {wanted.steps}, then online"]
    if wanted.steps == cfg.run.steps:
        notices = [notices[0].removesuffix(", then online")]
    if found.counts["retokenised"]:
        notices.append(f"offline: {found.counts['retokenised']} responses have no stored tokens and were put into tokens from their text")
    return notices + (_check_behaviour(cfg, found) if wanted.objective == "rl" else [])


def _check_behaviour(cfg: Config, found: StoredSamples) -> list[str]:
    """Of RL: are the stored log-probabilities there, and of the distribution that is trained?"""
    now, then = cfg.sampling.temperature, found.temperatures - {cfg.sampling.temperature}
    if then:
        raise ConfigError(
            f"data.rollouts={cfg.data.rollouts} was drawn at temperature {min(then):g}, and sampling.temperature={now:g}: "
            f"the ratio of the two policies would mean nothing. Set sampling.temperature={min(then):g}"
        )
    notices = []
    if missing := found.counts["no_logp"]:
        if cfg.offline.missing_logp == "refuse":
            raise ConfigError(
                f"data.rollouts={cfg.data.rollouts}: {missing} of {found.counts['lines']} samples have no `rollout_logp`. Write them with "
                "launch/generate.py, or set offline.missing_logp=recompute, which takes the trainer's own and corrects nothing"
            )
        notices.append(f"offline: {missing} samples count as on-policy: they have no stored log-probabilities")
    if cfg.algo.correction.mode == "none":
        notices.append("offline: algo.correction.mode=none, so old samples count as if the present policy had drawn them")
    return notices


def _take(cfg: Config, store: StoredSamples, step: int) -> list[Sample]:
    """The step's samples with their mini batches, where the objective itself cuts them; RL's logic cuts its own."""
    samples = store.step(step, cfg.offline.batch or cfg.rollout.prompts_per_step)
    if cfg.offline.objective != "rl":
        size = cfg.actor.mini_batch or len(samples)
        for position, s in enumerate(samples):
            s.mini_batch = position // size
    return samples


def _describe(cfg: Config, store: list[StoredSamples], step: int, rows: list[Sample]) -> Stats:
    """offline/*, and what the console's columns need."""
    batch = cfg.offline.batch or cfg.rollout.prompts_per_step
    store[0].keep(step, batch, rows, "ref_logp")
    version = sum(s.version for s in rows) / len(rows)
    stats = {"offline/epoch": store[0].epoch(step, batch), "batch/tokens": float(sum(s.num_tokens for s in rows))}
    if cfg.offline.objective == "rl":
        stats |= {"offline/version": version, "offline/staleness": step - 1 - version}
    return stats
