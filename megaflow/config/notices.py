"""What a configuration may well mean, and more often does not: told at the start, and no error."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from megaflow.config.checks import samples_per_step
from megaflow.config.schema import Config
from megaflow.config.steps import parse_steps


def notices(config: Config) -> list[str]:
    """One line each."""
    return [text for rule in RULES for text in rule(config)]


def several_updates_without_a_ratio(config: Config) -> Iterator[str]:
    updates = config.actor.epochs * (samples_per_step(config) // (config.actor.mini_batch or samples_per_step(config)))
    if config.algo.loss == "policy_gradient" and updates > 1:
        yield (
            f"algo.loss=policy_gradient knows no old policy, and {updates} updates are made on the samples of a step: from the second on "
            "its gradient is biased. Set actor.mini_batch=0 and actor.epochs=1, or take algo.loss=ppo_clip"
        )


def estimator_that_does_not_pull(config: Config) -> Iterator[str]:
    kl = config.algo.kl
    why = {
        "k1": "its gradient does not depend on the reference and is zero in expectation: it pulls nowhere",
        "abs": "its gradient is 1 per token in size however close the policies are, and is that of no KL",
    }
    if kl.where == "loss" and kl.estimator in why:
        yield f"algo.kl.estimator={kl.estimator} with algo.kl.where=loss: {why[kl.estimator]}. Take k3 (as recipes do), k2 or k3+"


def penalty_against_the_same_policy(config: Config) -> Iterator[str]:
    algo, actor = config.algo, config.actor
    if algo.loss == "kl_cov" and actor.epochs == 1 and actor.mini_batch in (0, samples_per_step(config)):
        yield (
            "algo.loss=kl_cov holds tokens to the old policy, and with one update a step the policy is the old one: it does nothing. "
            "Set actor.mini_batch below the samples of a step"
        )


def rollback_seldom_saves(config: Config) -> Iterator[str]:
    guard = config.guard
    actions = {name: getattr(guard, name) for name in vars(guard) if name.endswith("_action")}
    wanting = [name for name, action in actions.items() if action == "rollback"]
    if wanting and not config.run.save_every:
        yield f"guard.{wanting[0]}=rollback with run.save_every=0 always goes back to the beginning; set run.save_every"


def profile_beyond_the_run(config: Config) -> Iterator[str]:
    text, steps, last = config.profile.steps, parse_steps(config.profile.steps), config.run.steps
    if steps and min(steps) > last:
        yield f"profile.steps={text} lies beyond run.steps={last}: no trace is written. Name steps from 1 to {last}"
    elif steps and max(steps) > last:
        yield f"profile.steps={text} goes beyond run.steps={last}: the trace ends with the run"


def profile_with_a_gap(config: Config) -> Iterator[str]:
    steps = {step for step in parse_steps(config.profile.steps) if step <= config.run.steps}
    if steps and len(steps) <= max(steps) - min(steps):
        yield (
            f"profile.steps={config.profile.steps} has a gap, and torch's trace of each rank goes from step {min(steps)} to {max(steps)} "
            "without one; phases.json has the named steps alone"
        )


RULES: list[Callable[[Config], Iterator[str]]] = [
    several_updates_without_a_ratio,
    estimator_that_does_not_pull,
    penalty_against_the_same_policy,
    rollback_seldom_saves,
    profile_beyond_the_run,
    profile_with_a_gap,
]
