"""Rules about prompts, held-out sets and stored samples."""

from __future__ import annotations

import os

from megaflow.config.rules.job import Found, Job, has_eval_sets


def all_sources_have_weights_or_none(job: Job) -> Found:
    without = [number for number, source in enumerate(job.config.data.train) if source.weight == 0]
    if without and len(without) < len(job.config.data.train):
        text = f"data.train.{without[0]}.weight is 0 and other sources have weights; give it one, or none of them (they are then joined)"
        yield (f"data.train.{without[0]}.weight",), text


def data_is_given(job: Job) -> Found:
    if not job.config.data.train:
        yield ("data.train",), "data.train is empty; give at least one source, e.g. data.train=[{path: data/train.jsonl}]"


def sources_are_complete(job: Job) -> Found:
    for part in ("train", "eval"):
        for number, source in enumerate(getattr(job.config.data, part)):
            key = f"data.{part}.{number}"
            if not source.path:
                yield (f"{key}.path",), f"{key}.path is not set"
            elif source.path.startswith("reasoning-gym:"):
                if source.limit == 0:
                    yield (f"{key}.path",), f"{key} is a procedural task and needs {key}.limit, how many prompts to make"
            elif source.options:
                yield (f"{key}.options",), f"{key}.options are settings of a procedural task, and {source.path} is a file"


def source_names_differ(job: Job) -> Found:
    for part, reserved in (("train", []), ("eval", ["train", "heldout"])):
        names: dict[str, str] = dict.fromkeys(reserved, "the program's own")
        for number, source in enumerate(getattr(job.config.data, part)):
            key = f"data.{part}.{number}"
            if source.label in names:
                yield (key,), f"{key} is called {source.label!r} in metrics, which is {names[source.label]}; give it another `name`"
            names.setdefault(source.label, f"data.{part}.{number}'s name too")


def evaluation_has_sets(job: Job) -> Found:
    every = job.config.eval.every
    if every and not has_eval_sets(job.config):
        yield ("eval.every",), f"eval.every={every} but there is nothing to evaluate on: data.eval is empty and data.eval_fraction is 0"


def there_are_eval_sets(job: Job) -> Found:
    if not has_eval_sets(job.config):
        yield ("data.eval",), "there is nothing to evaluate on: data.eval is empty and data.eval_fraction is 0"


def offline_has_data(job: Job) -> Found:
    config, offline = job.config, job.config.offline
    if offline.steps and not config.data.rollouts:
        yield ("offline.steps",), f"offline.steps={offline.steps} learn from stored data, and data.rollouts is not set"
    if config.data.rollouts and not offline.steps:
        yield ("data.rollouts",), f"data.rollouts={config.data.rollouts} is read in the first offline.steps steps, and offline.steps=0"
    if offline.steps > config.run.steps:
        yield ("offline.steps", "run.steps"), f"offline.steps={offline.steps} is beyond run.steps={config.run.steps}, the whole run"


def stored_samples_exist(job: Job) -> Found:
    rollouts = job.config.data.rollouts
    if rollouts and not os.path.exists(rollouts):
        yield ("data.rollouts",), f"data.rollouts={rollouts}: no such file or folder (seen from {os.getcwd()})"


def offline_objective_fits(job: Job) -> Found:
    config, offline = job.config, job.config.offline
    if not offline.steps or offline.objective == "rl":
        return
    name = f"offline.objective={offline.objective}"
    if config.sampling.temperature != 1:
        text = f"{name} learns the model's own distribution, and sampling.temperature={config.sampling.temperature} is another; set it to 1"
        yield ("sampling.temperature", "offline.objective"), text
    if offline.objective == "dpo" and config.actor.epochs != 1:
        text = f"{name} weighs each pair anew for each optimizer step: actor.epochs must be 1, not {config.actor.epochs}; use more steps"
        yield ("actor.epochs", "offline.objective"), text
    if offline.objective == "dpo" and config.actor.mini_batch % 2:
        yield ("actor.mini_batch",), f"{name}: a pair is two samples, so actor.mini_batch={config.actor.mini_batch} must be even"


def offline_steps_are_set(job: Job) -> Found:
    if not job.config.offline.steps:
        yield ("offline.steps",), "offline.steps=0: nothing is learned from stored data; set it, e.g. to run.steps, and data.rollouts"
