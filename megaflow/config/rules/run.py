"""Rules about the run, its model and what is chosen by name."""

from __future__ import annotations

import importlib
import os

from megaflow.config.rules.job import Found, Job
from megaflow.config.schema import PHASES
from megaflow.config.steps import parse_steps
from megaflow.registry import Registry
from megaflow.types import ConfigError


def run_name_is_one_word(job: Job) -> Found:
    name = job.config.run.name
    if not name or name in (".", "..") or "/" in name or "\\" in name or name != name.strip():
        yield ("run.name",), f"run.name={name!r} must be a folder's name, not a path; run.root says where it is made"


def resume_exists(job: Job) -> Found:
    resume = job.config.run.resume
    if resume not in ("auto", "never") and not os.path.isdir(resume):
        yield ("run.resume",), f"run.resume={resume} is neither auto nor never nor an existing checkpoint folder"


def model_is_given(job: Job) -> Found:
    if not job.config.model.path:
        yield ("model.path",), "model.path is not set: give a Hugging Face folder, e.g. model.path=models/tiny"


def varlen_needs_16_bit(job: Job) -> Found:
    model = job.config.model
    if model.attention == "varlen" and model.dtype == "float32":
        yield ("model.attention", "model.dtype"), "model.attention=varlen needs 16 bits, and model.dtype=float32; use attention=auto"


def profile_steps_are_steps(job: Job) -> Found:
    try:
        parse_steps(job.config.profile.steps)
    except ConfigError as error:
        yield ("profile.steps",), f"profile.steps: {error}"


def watched_phases_are_known(job: Job) -> Found:
    limits = job.config.watchdog.phases
    unknown = sorted(limits.keys() - set(PHASES))
    if unknown:
        yield ("watchdog.phases",), f"watchdog.phases: {', '.join(unknown)} is not a phase; there are {', '.join(PHASES)}"
    if any(seconds < 0 for seconds in limits.values()):
        yield ("watchdog.phases",), "watchdog.phases: seconds must not be negative; 0: no limit"


def names_are_known(job: Job) -> Found:
    """What is chosen by name, against the registry of the package that has it. Nothing is imported but the package's table of names."""
    config = job.config
    chosen = [
        ("algo.advantage", config.algo.advantage, "megaflow.algo:ADVANTAGES"),
        ("algo.loss", config.algo.loss, "megaflow.algo:LOSSES"),
        ("rollout.backend", config.rollout.backend, "megaflow.rollout:BACKENDS"),
    ]
    chosen += [(f"reward.functions.{i}.name", each.name, "megaflow.rewards:REWARDS") for i, each in enumerate(config.reward.functions)]
    chosen += [("monitor.trackers", name, "megaflow.monitor:TRACKERS") for name in config.monitor.trackers]
    for key, name, registry in chosen:
        try:
            registry_at(registry).validate(name)
        except ConfigError as error:
            yield (key,), f"{key}: {error}"


def trackers_differ(job: Job) -> Found:
    trackers = job.config.monitor.trackers
    if twice := sorted({name for name in trackers if trackers.count(name) > 1}):
        yield ("monitor.trackers",), f"monitor.trackers: {', '.join(twice)} is there twice, and would write all figures twice; name it once"


def registry_at(target: str) -> Registry:
    """The Registry that "package:NAME" says. By name, since the configuration lies below the packages that it configures."""
    package, _, name = target.partition(":")
    registry: Registry = getattr(importlib.import_module(package), name)
    return registry
