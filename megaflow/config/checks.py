"""Contradictions between sections. One small function per rule, all of them run, all failures raised together.

A rule yields (keys concerned, message); the error begins with the places where those keys were set. Rules live in rules/, a file for each
subject; a new one is written there and named in one of the lists below.
"""

from __future__ import annotations

from collections.abc import Callable

from megaflow.config.loading import Loaded
from megaflow.config.rules import algo, best, data, parallel, reward, run, sampling
from megaflow.config.rules.job import Found, Job, generates, gives_rewards, has_eval_sets, samples_per_step
from megaflow.config.rules.run import registry_at
from megaflow.types import ConfigError

__all__ = ["check", "generates", "gives_rewards", "has_eval_sets", "registry_at", "samples_per_step"]


def check(loaded: Loaded, world_size: int, ranks_per_host: int | None = None, purpose: str = "train", with_files: bool = True) -> None:
    """Raises ConfigError with one line for each contradiction. `purpose`: train, offline, evaluate or generate.

    with_files: also what must be on disk, which a plan does not read.
    """
    job = Job(loaded.config, world_size, ranks_per_host or world_size)
    rules = RULES + {"train": TRAINING_RULES, "offline": OFFLINE_RULES, "evaluate": EVALUATION_RULES, "generate": GENERATION_RULES}[purpose]
    errors = [f"{loaded.blame(*keys)}: {message}" for rule in rules if with_files or rule not in FILE_RULES for keys, message in rule(job)]
    if errors:
        raise ConfigError("\n".join(dict.fromkeys(errors)))


RULES: list[Callable[[Job], Found]] = [
    run.run_name_is_one_word,
    run.resume_exists,
    run.model_is_given,
    run.varlen_needs_16_bit,
    parallel.expert_ranks_divide_world,
    parallel.virtual_stages_need_stages,
    parallel.sequence_parallel_needs_tp,
    parallel.model_ranks_divide_world,
    parallel.engines_divide_world,
    parallel.engine_experts_fit,
    sampling.top_k_is_off_or_positive,
    run.profile_steps_are_steps,
    run.watched_phases_are_known,
    sampling.eval_samples_differ,
    data.sources_are_complete,
    data.source_names_differ,
    reward.reward_is_given,
    reward.reward_functions_differ,
    reward.reward_model_is_one,
    reward.reward_engines_fit,
    run.names_are_known,
    run.trackers_differ,
]
TRAINING_RULES: list[Callable[[Job], Found]] = [
    data.data_is_given,
    sampling.training_samples,
    parallel.mini_batch_divides_step,
    parallel.every_rank_gets_a_sample,
    algo.groups_carry_signal,
    algo.learning_rate_decays_down,
    algo.betas_are_two,
    algo.kl_has_a_weight,
    algo.guards_have_what_they_read,
    algo.correction_has_a_ratio,
    algo.measured_routes_are_read,
    algo.covariance_bounds_are_in_order,
    algo.dynamic_sampling_fits,
    algo.greedy_baseline_fits,
    data.all_sources_have_weights_or_none,
    data.evaluation_has_sets,
    best.best_metric_is_measured,
    data.offline_has_data,
    data.stored_samples_exist,
    data.offline_objective_fits,
]
EVALUATION_RULES: list[Callable[[Job], Found]] = [data.there_are_eval_sets]
OFFLINE_RULES: list[Callable[[Job], Found]] = [*TRAINING_RULES, data.offline_steps_are_set]
GENERATION_RULES: list[Callable[[Job], Found]] = [data.data_is_given, sampling.generation_has_a_choice, sampling.output_fits_format]
FILE_RULES: list[Callable[[Job], Found]] = [run.resume_exists, data.stored_samples_exist]
