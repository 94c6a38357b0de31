"""Rules about advantages, losses, guards and the optimizer."""

from __future__ import annotations

from megaflow.config.rules.job import Found, Job

COMPARE_WITHIN_GROUP = ("grpo", "rloo", "opo", "gpg", "reinforce_pp_baseline")


def groups_carry_signal(job: Job) -> Found:
    name, samples = job.config.algo.advantage, job.config.rollout.samples_per_prompt
    keys = ("rollout.samples_per_prompt", "algo.advantage")
    if name in COMPARE_WITHIN_GROUP and samples == 1:
        yield keys, f"algo.advantage={name} compares samples of a prompt, and rollout.samples_per_prompt=1: all advantages are 0; use more"
    if name == "pass_at_k" and job.config.algo.pass_k >= samples:
        text = f"algo.pass_k={job.config.algo.pass_k} must be below rollout.samples_per_prompt={samples} (equal: all advantages are 0)"
        yield ("algo.pass_k", "rollout.samples_per_prompt"), text
    if job.config.algo.drop_uniform and samples == 1:
        text = "algo.drop_uniform=true with rollout.samples_per_prompt=1 would leave out every sample: a group of one is always uniform"
        yield ("algo.drop_uniform", "rollout.samples_per_prompt"), text


def learning_rate_decays_down(job: Job) -> Found:
    actor = job.config.actor
    if actor.min_lr > actor.lr:
        yield ("actor.min_lr", "actor.lr"), f"actor.min_lr={actor.min_lr} is above actor.lr={actor.lr}"


def betas_are_two(job: Job) -> Found:
    betas = job.config.actor.betas
    if len(betas) != 2 or not all(0 <= each < 1 for each in betas):
        yield ("actor.betas",), f"actor.betas={betas} must be two numbers of [0, 1)"


def kl_has_a_weight(job: Job) -> Found:
    kl = job.config.algo.kl
    if kl.where != "none" and kl.coef == 0:
        text = f"algo.kl.where={kl.where} with algo.kl.coef=0 keeps a reference model for nothing; set where=none or coef > 0"
        yield ("algo.kl.where", "algo.kl.coef"), text


def guards_have_what_they_read(job: Job) -> Found:
    guard, kl = job.config.guard, job.config.algo.kl
    if guard.kl and kl.where == "none":
        text = f"guard.kl={guard.kl} limits the distance to a reference model, and algo.kl.where=none keeps none"
        yield ("guard.kl", "algo.kl.where"), f"{text}; guard.step_kl limits how far one step moves the policy"
    for name in (name for name in vars(guard) if name.endswith("_action") and getattr(guard, name) == "raise_kl"):
        if kl.where == "none":
            text = f"guard.{name}=raise_kl raises algo.kl.coef, and algo.kl.where=none does not use it; set where=loss or another action"
            yield (f"guard.{name}", "algo.kl.where"), text


def measured_routes_are_read(job: Job) -> Found:
    if job.config.actor.router_replay == "measure" and job.config.algo.old_logp == "rollout":
        text = "actor.router_replay=measure counts routes in a forward pass that algo.old_logp=rollout leaves out; set one of them back"
        yield ("actor.router_replay", "algo.old_logp"), text


def correction_has_a_ratio(job: Job) -> Found:
    algo = job.config.algo
    if algo.old_logp == "rollout" and (algo.correction.mode != "none" or algo.correction.reject != "none"):
        text = "algo.old_logp=rollout takes the engine's log-probabilities for the trainer's, so algo.correction has nothing to correct"
        yield ("algo.old_logp", "algo.correction.mode", "algo.correction.reject"), f"{text}; set one of the two back"
    if algo.old_logp == "rollout" and job.config.guard.mismatch:
        text = "algo.old_logp=rollout measures no mismatch, so guard.mismatch never acts; set one of the two back"
        yield ("algo.old_logp", "guard.mismatch"), text


def covariance_bounds_are_in_order(job: Job) -> Found:
    cov = job.config.algo.cov
    if cov.low > cov.high:
        yield ("algo.cov.low", "algo.cov.high"), f"algo.cov.low={cov.low} is above algo.cov.high={cov.high}: no token lies between"


def dynamic_sampling_fits(job: Job) -> Found:
    algo, samples = job.config.algo, job.config.rollout.samples_per_prompt
    dynamic = algo.dynamic
    if not dynamic.rounds and (dynamic.factor > 1 or dynamic.surplus == "keep" or dynamic.short == "fill"):
        yield ("algo.dynamic",), "algo.dynamic.rounds=0 is off, and its other keys do nothing; set rounds, e.g. to 10"
    if dynamic.rounds and samples == 1:
        text = "algo.dynamic looks for groups whose rewards differ, and rollout.samples_per_prompt=1: no group of one does"
        yield ("algo.dynamic.rounds", "rollout.samples_per_prompt"), text
    if dynamic.rounds and dynamic.short == "fill" and algo.drop_uniform:
        text = "algo.dynamic.short=fill fills a step with groups that algo.drop_uniform=true then leaves out; set one of the two back"
        yield ("algo.dynamic.short", "algo.drop_uniform"), text


def greedy_baseline_fits(job: Job) -> Found:
    algo = job.config.algo
    if algo.advantage == "remax" and algo.length.form == "group":
        text = "algo.length.form=group compares lengths within a group, and the greedy response of algo.advantage=remax has none"
        yield ("algo.length.form", "algo.advantage"), f"{text}; use form=linear"
    if algo.advantage == "remax" and job.config.offline.steps and job.config.offline.objective == "rl":
        text = "algo.advantage=remax needs a greedy response to each prompt, which stored samples do not have; use e.g. rloo"
        yield ("algo.advantage", "offline.steps"), text
