"""Contradictions between sections. One small function per rule, all of them run, all failures raised together.

A rule yields (keys concerned, message); the error begins with the places where those keys were set.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from megaflow.config.loading import Loaded
from megaflow.config.schema import Config
from megaflow.registry import Registry
from megaflow.types import ConfigError


@dataclass(frozen=True)
class Job:
    """What the rules look at: the configuration and how many ranks there are, in all and on each host."""

    config: Config
    world_size: int
    ranks_per_host: int


Found = Iterator[tuple[tuple[str, ...], str]]


def check(loaded: Loaded, world_size: int, ranks_per_host: int | None = None, purpose: str = "train") -> None:
    """Raises ConfigError with one line for each contradiction. `purpose`: train or evaluate."""
    job = Job(loaded.config, world_size, ranks_per_host or world_size)
    rules = RULES + (TRAINING_RULES if purpose == "train" else EVALUATION_RULES)
    errors = [f"{loaded.blame(*keys)}: {message}" for rule in rules for keys, message in rule(job)]
    if errors:
        raise ConfigError("\n".join(dict.fromkeys(errors)))


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


def only_supported_axes(job: Job) -> Found:
    for axis in ("vpp", "cp", "ep", "etp"):
        size = getattr(job.config.parallel, axis)
        if size > 1:
            yield (f"parallel.{axis}",), f"parallel.{axis}={size} is not supported yet; only {axis}=1 is. tp and pp work"


def virtual_stages_need_stages(job: Job) -> Found:
    parallel = job.config.parallel
    if parallel.vpp > 1 and parallel.pp == 1:
        yield ("parallel.vpp", "parallel.pp"), f"parallel.vpp={parallel.vpp} needs parallel.pp > 1, and it is 1"


def sequence_parallel_needs_tp(job: Job) -> Found:
    parallel = job.config.parallel
    if parallel.sp and parallel.tp == 1:
        yield ("parallel.sp", "parallel.tp"), "parallel.sp=true splits over tensor parallel ranks, and parallel.tp is 1; set sp=false"


def model_ranks_divide_world(job: Job) -> Found:
    parallel = job.config.parallel
    size = parallel.tp * parallel.pp * parallel.cp
    if job.world_size % size:
        keys = ("parallel.tp", "parallel.pp", "parallel.cp")
        product = f"parallel.tp={parallel.tp} * pp={parallel.pp} * cp={parallel.cp} = {size}"
        yield keys, f"{product} ranks hold one copy of the actor, which does not divide the {job.world_size} rank(s) of this job"


def engines_divide_world(job: Job) -> Found:
    tp = job.config.rollout.tp
    if job.world_size % tp:
        usable = _divisors(job.world_size)
        yield ("rollout.tp",), f"rollout.tp={tp} does not divide the {job.world_size} rank(s) of this job; use {usable}"
    elif job.ranks_per_host % tp:
        usable = _divisors(job.ranks_per_host)
        yield ("rollout.tp",), f"rollout.tp={tp}: an engine lives on one host, and a host has {job.ranks_per_host} ranks; use {usable}"


def mini_batch_divides_step(job: Job) -> Found:
    config = job.config
    mini, per_step = config.actor.mini_batch, samples_per_step(config)
    keys = ("actor.mini_batch", "rollout.prompts_per_step", "rollout.samples_per_prompt")
    if mini and per_step % mini:
        product = f"prompts_per_step={config.rollout.prompts_per_step} * samples_per_prompt={config.rollout.samples_per_prompt}"
        yield keys, f"actor.mini_batch={mini} does not divide the {per_step} samples of a step ({product})"


def every_rank_gets_a_sample(job: Job) -> Found:
    config = job.config
    mini = config.actor.mini_batch or samples_per_step(config)
    data_parallel = job.world_size // (config.parallel.tp * config.parallel.pp * config.parallel.cp)
    keys = ("actor.mini_batch", "rollout.prompts_per_step", "rollout.samples_per_prompt")
    if mini < data_parallel:
        yield keys, f"an optimizer step has {mini} sample(s), fewer than the {data_parallel} data-parallel ranks; give each at least one"


COMPARE_WITHIN_GROUP = ("grpo", "rloo", "opo", "gpg", "reinforce_pp_baseline")


def groups_carry_signal(job: Job) -> Found:
    name, samples = job.config.algo.advantage, job.config.rollout.samples_per_prompt
    keys = ("rollout.samples_per_prompt", "algo.advantage")
    if name in COMPARE_WITHIN_GROUP and samples == 1:
        yield keys, f"algo.advantage={name} compares samples of a prompt, and rollout.samples_per_prompt=1: all advantages are 0; use more"
    if name == "pass_at_k" and job.config.algo.pass_k >= samples:
        text = f"algo.pass_k={job.config.algo.pass_k} must be below rollout.samples_per_prompt={samples} (equal: all advantages are 0)"
        yield ("algo.pass_k", "rollout.samples_per_prompt"), text


def training_samples(job: Job) -> Found:
    if job.config.sampling.temperature == 0:
        text = "sampling.temperature=0 draws the same response every time, and log-probabilities need a temperature; use e.g. 1.0"
        yield ("sampling.temperature",), f"{text} (eval.temperature is apart)"


def top_k_is_off_or_positive(job: Job) -> Found:
    top_k = job.config.sampling.top_k
    if top_k != -1 and top_k < 1:
        yield ("sampling.top_k",), f"sampling.top_k={top_k} must be -1 (off) or at least 1"


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


def reward_is_given(job: Job) -> Found:
    if not job.config.reward.functions:
        yield ("reward.functions",), "reward.functions is empty; give at least one, e.g. reward.functions=[{name: exact}]"


def reward_functions_differ(job: Job) -> Found:
    functions = [(each.name, each.options) for each in job.config.reward.functions]
    for number, function in enumerate(functions):
        if function in functions[:number]:
            key = f"reward.functions.{number}"
            yield (f"{key}.name",), f"{key}: {function[0]} is there twice with the same options; add up its weights instead"


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


def registry_at(target: str) -> Registry:
    """The Registry that "package:NAME" says. By name, since the configuration lies below the packages that it configures."""
    package, _, name = target.partition(":")
    registry: Registry = getattr(importlib.import_module(package), name)
    return registry


def samples_per_step(config: Config) -> int:
    """N, sequences generated in a step."""
    return config.rollout.prompts_per_step * config.rollout.samples_per_prompt


def has_eval_sets(config: Config) -> bool:
    return bool(config.data.eval) or config.data.eval_fraction > 0


def _divisors(number: int) -> str:
    found = [str(size) for size in range(1, number + 1) if number % size == 0]
    return found[0] if len(found) == 1 else ", ".join(found[:-1]) + " or " + found[-1]


RULES: list[Callable[[Job], Found]] = [
    run_name_is_one_word,
    resume_exists,
    model_is_given,
    varlen_needs_16_bit,
    only_supported_axes,
    virtual_stages_need_stages,
    sequence_parallel_needs_tp,
    model_ranks_divide_world,
    engines_divide_world,
    top_k_is_off_or_positive,
    sources_are_complete,
    source_names_differ,
    reward_is_given,
    reward_functions_differ,
    names_are_known,
]
TRAINING_RULES: list[Callable[[Job], Found]] = [
    data_is_given,
    training_samples,
    mini_batch_divides_step,
    every_rank_gets_a_sample,
    groups_carry_signal,
    learning_rate_decays_down,
    betas_are_two,
    kl_has_a_weight,
    evaluation_has_sets,
]
EVALUATION_RULES: list[Callable[[Job], Found]] = [there_are_eval_sets]
