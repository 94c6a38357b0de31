"""Rules about run.keep_best: what it ranks checkpoints by must be a metric of the run, and of the model."""

from __future__ import annotations

import importlib
import re

from megaflow.config.rules.job import Found, Job, has_eval_sets
from megaflow.config.schema import Config
from megaflow.registry import nearest

# of the machine, or not yet known when the step is saved
NOT_OF_THE_MODEL = ("time/", "perf/", "mem/", "device/", "sync/", "save/", "guard/", "generate/")


def best_metric_is_measured(job: Job) -> Found:
    run, keys = job.config.run, ("run.best_metric", "run.keep_best")
    if run.keep_best and not run.best_metric:
        yield keys, f"run.keep_best={run.keep_best} needs run.best_metric, what is best, e.g. {_example(job.config)}"
    if run.best_metric and not run.keep_best:
        yield keys, f"run.best_metric={run.best_metric} does nothing while run.keep_best is 0; set it to how many are to be kept"
    if run.keep_best and run.best_metric:
        yield from ((keys, f"run.best_metric={run.best_metric} {why}") for why in _faults(job.config))


def _faults(config: Config) -> list[str]:
    name = config.run.best_metric
    metrics = importlib.import_module("megaflow.monitor.metrics")  # by name: the configuration lies below it
    known = _known(config, metrics.METRICS)
    if metrics.describe(name) is None or _is_misspelt(config, name, known):
        return [f"is no metric{nearest(name, known)}; docs/config.md has the list"]
    if name.startswith(NOT_OF_THE_MODEL):
        return ["is of the machine or of the run, not of the policy; take a reward/*, train/* or eval/*"]
    if name.startswith("eval/"):
        return _faults_of_eval(config, name, known)
    return []


def _is_misspelt(config: Config, name: str, known: list[str]) -> bool:
    """reward/<fn> of no function of the run, or train/<name> of no built-in loss; a loss of the user's own may report anything."""
    own_loss = ":" in config.algo.loss
    return name not in known and (name.startswith("reward/") or (name.startswith("train/") and not own_loss))


def _faults_of_eval(config: Config, name: str, known: list[str]) -> list[str]:
    sets = [source.label for source in config.data.eval] + ["heldout"] * (config.data.eval_fraction > 0)
    if not has_eval_sets(config):
        return ["needs something to evaluate on: data.eval is empty and data.eval_fraction is 0"]
    if name.split("/")[1] not in sets:
        return [f"is of a set that is not evaluated; there are {', '.join(sets)}{nearest(name, known)}"]
    if not config.eval.every and not config.eval.after:
        return ["is never measured after a step: eval.every=0 and eval.after=false; set eval.every to run.save_every"]
    if re.search(r"@\d+$", name) and config.eval.samples == 1:
        return ["needs eval.samples > 1"]
    return []


def _known(config: Config, names: dict[str, str]) -> list[str]:
    """Metric names with the run's own reward functions and sets in place of <fn> and <set>."""
    part_names = importlib.import_module("megaflow.rewards.pool").part_names
    sets = [source.label for source in config.data.eval] + ["heldout"] * (config.data.eval_fraction > 0)
    plain = [name for name in names if "<" not in name]
    plain += [f"reward/{part}" for part in part_names(config.reward.functions)]
    return plain + [f"eval/{each}/{figure}" for each in sets for figure in ("accuracy", "reward")]


def _example(config: Config) -> str:
    return next((name for name in _known(config, {}) if name.startswith("eval/")), "reward/mean")
