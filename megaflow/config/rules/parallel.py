"""Rules about ranks: how many a copy of the actor, of its experts and of an engine takes, and what each of them gets to do."""

from __future__ import annotations

import math

from megaflow.config.rules.job import Found, Job, divisors, samples_per_step


def expert_ranks_divide_world(job: Job) -> Found:
    yield from _copy_divides_world(job, ("ep", "etp", "pp"), "the experts")


def model_ranks_divide_world(job: Job) -> Found:
    yield from _copy_divides_world(job, ("tp", "pp", "cp"), "the actor")


def _copy_divides_world(job: Job, axes: tuple[str, ...], what: str) -> Found:
    sizes = {axis: getattr(job.config.parallel, axis) for axis in axes}
    size = math.prod(sizes.values())
    if job.world_size % size:
        product = " * ".join(f"{axis}={n}" for axis, n in sizes.items())
        text = f"parallel.{product} = {size} ranks hold one copy of {what}, which does not divide the {job.world_size} rank(s) of this job"
        yield tuple(f"parallel.{axis}" for axis in axes), text


def virtual_stages_need_stages(job: Job) -> Found:
    parallel = job.config.parallel
    if parallel.vpp > 1 and parallel.pp == 1:
        yield ("parallel.vpp", "parallel.pp"), f"parallel.vpp={parallel.vpp} needs parallel.pp > 1, and it is 1"


def sequence_parallel_needs_tp(job: Job) -> Found:
    parallel = job.config.parallel
    if parallel.sp and parallel.tp == 1:
        yield ("parallel.sp", "parallel.tp"), "parallel.sp=true splits over tensor parallel ranks, and parallel.tp is 1; set sp=false"


def engines_divide_world(job: Job) -> Found:
    tp = job.config.rollout.tp
    if job.world_size % tp:
        usable = divisors(job.world_size)
        yield ("rollout.tp",), f"rollout.tp={tp} does not divide the {job.world_size} rank(s) of this job; use {usable}"
    elif job.ranks_per_host % tp:
        usable = divisors(job.ranks_per_host)
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
