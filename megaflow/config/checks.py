"""Contradictions between sections. One small function per rule, all of them run, all failures raised together.

A rule yields (keys concerned, message); the error begins with the places where those keys were set.
"""

from __future__ import annotations

import importlib
import math
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from megaflow.config.loading import Loaded
from megaflow.config.schema import Config
from megaflow.config.steps import parse_steps
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
    """Raises ConfigError with one line for each contradiction. `purpose`: train, offline, evaluate or generate."""
    job = Job(loaded.config, world_size, ranks_per_host or world_size)
    rules = RULES + {"train": TRAINING_RULES, "offline": OFFLINE_RULES, "evaluate": EVALUATION_RULES, "generate": GENERATION_RULES}[purpose]
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


def expert_ranks_divide_world(job: Job) -> Found:
    parallel = job.config.parallel
    size = parallel.etp * parallel.ep * parallel.pp
    if job.world_size % size:
        keys = ("parallel.ep", "parallel.etp", "parallel.pp")
        product = f"parallel.ep={parallel.ep} * etp={parallel.etp} * pp={parallel.pp} = {size}"
        yield keys, f"{product} ranks hold one copy of the experts, which does not divide the {job.world_size} rank(s) of this job"


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


def engine_experts_fit(job: Job) -> Found:
    tp, ep = job.config.rollout.tp, job.config.rollout.ep
    if ep not in (1, tp):
        yield ("rollout.ep", "rollout.tp"), f"rollout.ep={ep} must be 1 or rollout.tp={tp}: SGLang has experts cut over all ranks, or whole"


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
    if job.config.algo.drop_uniform and samples == 1:
        text = "algo.drop_uniform=true with rollout.samples_per_prompt=1 would leave out every sample: a group of one is always uniform"
        yield ("algo.drop_uniform", "rollout.samples_per_prompt"), text


def training_samples(job: Job) -> Found:
    if job.config.sampling.temperature == 0:
        text = "sampling.temperature=0 draws the same response every time, and log-probabilities need a temperature; use e.g. 1.0"
        yield ("sampling.temperature",), f"{text} (eval.temperature is apart)"


def profile_steps_are_steps(job: Job) -> Found:
    try:
        parse_steps(job.config.profile.steps)
    except ConfigError as error:
        yield ("profile.steps",), f"profile.steps: {error}"


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


def guards_have_what_they_read(job: Job) -> Found:
    guard, kl = job.config.guard, job.config.algo.kl
    if guard.kl and kl.where == "none":
        text = f"guard.kl={guard.kl} limits the distance to a reference model, and algo.kl.where=none keeps none"
        yield ("guard.kl", "algo.kl.where"), f"{text}; guard.step_kl limits how far one step moves the policy"
    for name in (name for name in vars(guard) if name.endswith("_action") and getattr(guard, name) == "raise_kl"):
        if kl.where == "none":
            text = f"guard.{name}=raise_kl raises algo.kl.coef, and algo.kl.where=none does not use it; set where=loss or another action"
            yield (f"guard.{name}", "algo.kl.where"), text


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


def eval_samples_differ(job: Job) -> Found:
    settings = job.config.eval
    if settings.samples > 1 and settings.temperature == 0:
        text = f"eval.temperature=0 draws the same response eval.samples={settings.samples} times; set a temperature, or samples=1"
        yield ("eval.samples", "eval.temperature"), text
    for k in settings.pass_k:
        if not 1 <= k <= settings.samples:
            yield ("eval.pass_k", "eval.samples"), f"eval.pass_k={k} must be of 1 to eval.samples={settings.samples}"


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


def generation_has_a_choice(job: Job) -> Found:
    wanted, sampling = job.config.generate, job.config.sampling
    if wanted.samples > 1 and sampling.temperature == 0:
        text = f"sampling.temperature=0 draws the same response generate.samples={wanted.samples} times; set samples=1 or a temperature"
        yield ("sampling.temperature", "generate.samples"), text
    if wanted.samples == 1 and wanted.kind in ("pairs", "best_of_n"):
        text = f"generate.kind={wanted.kind} chooses among the samples of a prompt, and generate.samples=1; draw more"
        yield ("generate.kind", "generate.samples"), text


def output_fits_format(job: Job) -> Found:
    wanted = job.config.generate
    if wanted.output and not wanted.output.endswith(f".{wanted.format}"):
        text = f"generate.output={wanted.output} must end in .{wanted.format} (generate.format), or nothing can read it"
        yield ("generate.output", "generate.format"), text


def offline_has_data(job: Job) -> Found:
    config, offline = job.config, job.config.offline
    if offline.steps and not config.data.rollouts:
        yield ("offline.steps",), f"offline.steps={offline.steps} learn from stored data, and data.rollouts is not set"
    if config.data.rollouts and not offline.steps:
        yield ("data.rollouts",), f"data.rollouts={config.data.rollouts} is read in the first offline.steps steps, and offline.steps=0"
    if config.data.rollouts and not os.path.exists(config.data.rollouts):
        yield ("data.rollouts",), f"data.rollouts={config.data.rollouts}: no such file or folder (seen from {os.getcwd()})"
    if offline.steps > config.run.steps:
        yield ("offline.steps", "run.steps"), f"offline.steps={offline.steps} is beyond run.steps={config.run.steps}, the whole run"


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
        text = f"reward.model.tp={model.tp} does not divide the {ranks} rank(s) of a host, where an engine lives; use {_divisors(ranks)}"
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


def generates(config: Config) -> bool:
    """Whether a training run needs an engine: not when all its steps learn from stored data and nothing is evaluated."""
    return config.offline.steps < config.run.steps or has_eval_sets(config)


def gives_rewards(config: Config) -> bool:
    """Whether there is a reward function or a reward model."""
    model = config.reward.model
    return bool(config.reward.functions) or bool(model.url if model.where == "remote" else model.path)


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
    expert_ranks_divide_world,
    virtual_stages_need_stages,
    sequence_parallel_needs_tp,
    model_ranks_divide_world,
    engines_divide_world,
    engine_experts_fit,
    top_k_is_off_or_positive,
    profile_steps_are_steps,
    eval_samples_differ,
    sources_are_complete,
    source_names_differ,
    reward_is_given,
    reward_functions_differ,
    reward_model_is_one,
    reward_engines_fit,
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
    guards_have_what_they_read,
    correction_has_a_ratio,
    covariance_bounds_are_in_order,
    dynamic_sampling_fits,
    greedy_baseline_fits,
    all_sources_have_weights_or_none,
    evaluation_has_sets,
    offline_has_data,
    offline_objective_fits,
]
EVALUATION_RULES: list[Callable[[Job], Found]] = [there_are_eval_sets]
OFFLINE_RULES: list[Callable[[Job], Found]] = [*TRAINING_RULES, offline_steps_are_set]
GENERATION_RULES: list[Callable[[Job], Found]] = [data_is_given, generation_has_a_choice, output_fits_format]
