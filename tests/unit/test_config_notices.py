"""What a configuration probably does not mean is told, and stops nothing; and the rules on guards, corrections and covariance."""

from __future__ import annotations

import pytest

from megaflow.config.checks import check
from megaflow.config.loading import load
from megaflow.config.notices import notices
from megaflow.types import ConfigError

BASE = ["model.path=m", "data.train=[{path: d.jsonl}]", "reward.functions=[{name: exact}]"]


@pytest.mark.parametrize("overrides, words", [
    (["algo.loss=policy_gradient", "actor.mini_batch=64"], "4 updates are made"),
    (["algo.loss=policy_gradient", "actor.epochs=2"], "2 updates are made"),
    (["algo.kl.where=loss", "algo.kl.estimator=k1"], "it pulls nowhere"),
    (["algo.kl.where=loss", "algo.kl.estimator=abs"], "1 per token"),
    (["algo.loss=kl_cov"], "it does nothing"),
    (["guard.kl_action=rollback", "run.save_every=0"], "goes back to the beginning"),
    (["profile.steps=9-12", "run.steps=4"], "profile.steps=9-12 lies beyond run.steps=4: no trace is written. Name steps from 1 to 4"),
    (["profile.steps=3-12", "run.steps=4"], "profile.steps=3-12 goes beyond run.steps=4: the trace ends with the run"),
    (["profile.steps='5,8-9'"], "profile.steps=5,8-9 has a gap, and torch's trace of each rank goes from step 5 to 9 without one"),
])  # fmt: skip
def test_what_is_told(overrides, words):
    (told,) = notices(load(None, BASE + overrides).config)
    assert words in told


@pytest.mark.parametrize("overrides", [
    [],
    ["algo.loss=policy_gradient"],
    ["algo.kl.where=reward", "algo.kl.estimator=k1"],
    ["algo.kl.where=loss", "algo.kl.estimator=k1+"],
    ["algo.loss=kl_cov", "actor.mini_batch=64"],
    ["guard.kl_action=rollback"],
    ["profile.steps=3-4", "run.steps=4"],
    ["profile.steps='5,6-7,8'"],
])  # fmt: skip
def test_what_is_not(overrides):
    assert notices(load(None, BASE + overrides).config) == []


@pytest.mark.parametrize("overrides, words", [
    (["guard.kl=0.05"], "guard.step_kl limits how far one step moves the policy"),
    (["guard.step_kl=0.05", "guard.step_kl_action=raise_kl"], "guard.step_kl_action=raise_kl raises algo.kl.coef"),
    (["algo.old_logp=rollout", "algo.correction.mode=token_tis"], "nothing to correct"),
    (["algo.old_logp=rollout", "algo.correction.reject=worst"], "nothing to correct"),
    (["algo.old_logp=rollout", "guard.mismatch=0.1"], "guard.mismatch never acts"),
    (["algo.cov.low=6"], "no token lies between"),
])  # fmt: skip
def test_contradictions_are_errors(overrides, words):
    with pytest.raises(ConfigError, match=words) as error:
        check(load(None, BASE + overrides), 1)
    assert f"argument {overrides[-1]}" in str(error.value)
