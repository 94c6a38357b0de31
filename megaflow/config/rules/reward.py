"""Rules about reward functions and reward models."""

from __future__ import annotations

import math

from megaflow.config.rules.job import Found, Job, divisors, generates, gives_rewards


def reward_is_given(job: Job) -> Found:
    if not gives_rewards(job.config) and (generates(job.config) or job.config.offline.objective == "rl"):
        yield ("reward.functions",), "reward.functions is empty; give one, e.g. reward.functions=[{name: exact}], or a reward.model"


def reward_model_is_one(job: Job) -> Found:
    model, offline = job.config.reward.model, job.config.offline
    if model.where == "engine" and not model.path:
        yield ("reward.model.where",), "reward.model.where=engine needs reward.model.path, a *ForSequenceClassification folder"
    if model.where != "remote" and model.url:
        text = f"reward.model.url is for reward.model.where=remote, and it is {model.where}; set where=remote, or path for url"
        yield ("reward.model.url",), text
    if model.where == "remote" and model.path:
        yield ("reward.model.path",), "reward.model.path is for reward.model.where=mesh or engine; a remote service has its own model"
    if model.where == "remote" and not model.url:
        yield ("reward.model.where",), "reward.model.where=remote needs reward.model.url, e.g. http://scorer:8000/score"
    if model.url and not model.url.startswith(("http://", "https://")):
        yield ("reward.model.url",), f"reward.model.url={model.url} must begin with http:// or https://"
    if model.path and offline.steps and offline.objective == "rl":
        text = f"reward.model.where={model.where} scores no stored samples (offline.steps > 0); use where=remote or functions"
        yield ("reward.model.path",), text


def reward_engines_fit(job: Job) -> Found:
    model, rollout = job.config.reward.model, job.config.rollout
    if model.where != "engine":
        return
    if job.ranks_per_host % model.tp or job.world_size % model.tp:
        ranks = math.gcd(job.world_size, job.ranks_per_host)
        text = f"reward.model.tp={model.tp} does not divide the {ranks} rank(s) of a host, where an engine lives; use {divisors(ranks)}"
        yield ("reward.model.tp",), text
    if rollout.backend == "sglang" and (both := model.mem_fraction + rollout.mem_fraction) >= 1:
        text = f"reward.model.mem_fraction={model.mem_fraction} + rollout.mem_fraction={rollout.mem_fraction} = {both:g} of a device"
        yield ("reward.model.mem_fraction", "rollout.mem_fraction"), f"{text}: both are awake while rewards are given; make it less than 1"


def reward_functions_differ(job: Job) -> Found:
    functions = [(each.name, each.options) for each in job.config.reward.functions]
    for number, function in enumerate(functions):
        if function in functions[:number]:
            key = f"reward.functions.{number}"
            yield (f"{key}.name",), f"{key}: {function[0]} is there twice with the same options; add up its weights instead"
