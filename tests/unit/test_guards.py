"""What each guard sees and does, how its actions are bounded, and what a run changes of its own settings."""

from __future__ import annotations

import json
import math
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

from megaflow.actor.optimizer import make_scheduler, scale_learning_rate
from megaflow.config.schema import ActorConfig, AlgoConfig, Config, GuardConfig, KLConfig, RolloutConfig
from megaflow.monitor.metrics import Metrics, read_metrics
from megaflow.trainer.control import Control
from megaflow.trainer.guards import Guards
from megaflow.trainer.supervisor import _lacking, _read_record
from megaflow.types import DivergedError

GOOD = {"train/loss": 0.1, "train/grad_norm": 1.0, "train/skipped": 0.0, "train/kl": 0.001, "train/ref_kl": 0.01, "train/entropy": 1.0,
        "mismatch/k3": 1e-6, "reward/mean": 0.5}  # fmt: skip
LIMITS = {"kl": 0.05, "step_kl": 0.02, "mismatch": 0.01, "entropy": 0.1, "reward_drop": 0.2, "reward_window": 1}


def judged(guards: Guards, step: int, **changes: float) -> list[tuple[str, str]]:
    stats = GOOD | {name.replace("__", "/"): value for name, value in changes.items()}
    return [(alarm.guard, alarm.action) for alarm in guards.judge(step, stats).alarms]


@pytest.mark.parametrize("guard, at_limit, past", [
    ("kl", {"train__ref_kl": 0.05}, {"train__ref_kl": 0.051}),
    ("step_kl", {"train__kl": 0.02}, {"train__kl": 0.021}),
    ("mismatch", {"mismatch__k3": 0.01}, {"mismatch__k3": 0.02}),
    ("entropy", {"train__entropy": 0.1}, {"train__entropy": 0.09}),
    ("reward_drop", {"reward__mean": 0.31}, {"reward__mean": 0.29}),
    ("nonfinite", {}, {"train__loss": math.nan}),
    ("nonfinite", {}, {"train__grad_norm": math.inf}),
    ("nonfinite", {}, {"train__skipped": 1.0}),
    ("nonfinite", {}, {"reward__mean": math.nan}),
])  # fmt: skip
def test_each_guard_sees_its_metric_past_its_limit_and_no_other(guard, at_limit, past):
    guards = Guards(GuardConfig(**LIMITS))
    assert judged(guards, 1) == [] and judged(guards, 2, **at_limit) == []
    assert judged(guards, 3, **past) == [(guard, "warn")]


def test_without_limits_only_what_is_not_finite_is_told():
    guards = Guards(GuardConfig())
    bad = {"train__kl": 9.0, "train__ref_kl": 9.0, "mismatch__k3": 9.0, "train__entropy": 0.0, "reward__mean": -9.0}
    assert judged(guards, 1) == [] and judged(guards, 2, **bad) == []
    assert judged(guards, 3, train__loss=math.nan) == [("nonfinite", "warn")]
    verdict = guards.judge(4, GOOD)
    assert verdict.stats == {"guard/fired": 0.0, "guard/actions": 0.0, "guard/rollbacks": 0.0}, "a warning is no action"


def test_reward_drop_compares_means_over_the_window_with_the_best():
    guards = Guards(GuardConfig(reward_drop=0.2, reward_window=3))
    for step, reward in enumerate([0.6, 0.9, 0.9, 0.3, 0.9], 1):  # means of three: 0.8, 0.7, 0.7
        assert judged(guards, step, reward__mean=reward) == []
    assert judged(guards, 6, reward__mean=0.61) == []  # 0.603: 0.197 below 0.8
    assert judged(guards, 7, reward__mean=0.2) == [("reward_drop", "warn")]  # 0.57


def test_a_cooldown_lets_an_action_take_effect_and_the_number_of_actions_is_bounded():
    guards = Guards(GuardConfig(step_kl=0.02, step_kl_action="lower_lr", cooldown=2, max_actions=2))
    found = [judged(guards, step, train__kl=0.1) for step in range(1, 7)]
    assert [action for ((_, action),) in found] == ["lower_lr", "warn", "warn", "lower_lr", "warn", "warn"]
    with pytest.raises(DivergedError, match="train/kl is 0.1, above 0.02: lower_lr, but guard.max_actions=2 have been taken"):
        guards.judge(7, GOOD | {"train/kl": 0.1})


def test_stop_ends_the_run_as_diverged():
    guards = Guards(GuardConfig(entropy=0.3, entropy_action="stop", max_actions=0))
    with pytest.raises(DivergedError, match="step 5: train/entropy is 0.2, below 0.3: stop"):
        guards.judge(5, GOOD | {"train/entropy": 0.2})
    assert guards.events[-1]["action"] == "stop"


def test_a_lasting_warning_is_news_once():
    guards = Guards(GuardConfig(kl=0.05))
    news = [guards.judge(step, GOOD | {"train/ref_kl": kl}).alarms for step, kl in enumerate([0.1, 0.1, 0.0, 0.1], 1)]
    assert [[alarm.is_news for alarm in alarms] for alarms in news] == [[True], [False], [], [True]]
    assert [event["step"] for event in guards.events] == [1, 4]


def test_weights_gone_wrong_are_not_left_alone_for_a_cooldown():
    guards = Guards(GuardConfig(nonfinite_action="rollback", cooldown=50))
    assert [judged(guards, step, train__loss=math.nan) for step in (1, 2)] == [[("nonfinite", "rollback")]] * 2
    assert guards.rollbacks == 2


def test_an_update_that_diverges_is_the_nonfinite_guards_if_it_goes_back():
    def diverges(*_):
        raise DivergedError("3 optimizer steps in a row")

    with pytest.raises(DivergedError):
        Guards(GuardConfig()).watched(diverges)
    guards = Guards(GuardConfig(nonfinite_action="rollback"))
    assert guards.watched(lambda x: {"train/loss": x}, 0.5) == {"train/loss": 0.5}
    assert guards.judge(1, GOOD | guards.watched(diverges)).has("rollback")
    after_the_critics = guards.watched(diverges) | {"train/loss": 0.1}  # the policy's update comes after the critic's
    assert guards.judge(2, GOOD | after_the_critics).has("rollback")
    assert guards.may_roll_back and not Guards(GuardConfig()).may_roll_back


def test_state_survives_json_and_a_rollback_forgets_later_rewards_but_not_the_best():
    guards = Guards(GuardConfig(reward_drop=0.2, reward_window=2, reward_drop_action="rollback", cooldown=0))
    for step, reward in enumerate([0.8, 0.8, 0.3], 1):
        last = judged(guards, step, reward__mean=reward)
    assert last == [("reward_drop", "rollback")]
    guards.rolled_back(2)
    resumed = Guards(guards.cfg)
    resumed.load_state_dict(json.loads(json.dumps(guards.state_dict())))
    for each in (guards, resumed):
        assert each.rewards == [(2, 0.8)] and each.best == 0.8 and each.actions == 1 and each.went_back_to == 2
        assert judged(each, 3, reward__mean=0.3) == [("reward_drop", "rollback")], "0.55 against 0.8"


def test_metrics_have_each_step_once_after_going_back(tmp_path: Path):
    metrics, archive = Metrics(tmp_path / "metrics.jsonl"), tmp_path / "metrics_rolled_back.jsonl"
    for step in (1, 2, 3):
        metrics.write(step, {"reward/mean": step / 10})
    metrics.go_back(1, archive, 4, {"reward/mean": 0.4})
    metrics.write(2, {"reward/mean": 0.9})
    metrics.go_back(0, archive, 3, {"reward/mean": math.nan})
    metrics.write(1, {"reward/mean": 0.7})
    assert [(line["step"], line["reward/mean"]) for line in read_metrics(tmp_path / "metrics.jsonl")] == [(1, 0.7)]
    gone = [(line["step"], line["reward/mean"], line["rolled_back_to"]) for line in read_metrics(archive)]
    assert gone == [(2, 0.2, 1), (3, 0.3, 1), (4, 0.4, 1), (1, 0.1, 0), (2, 0.9, 0), (3, None, 0)]


def test_the_record_of_a_rollback_belongs_to_one_checkpoint(tmp_path: Path):
    record, checkpoints = tmp_path / "rolled_back.json", tmp_path / "checkpoints"
    assert _read_record(record, checkpoints / "step_000004") == {}
    record.write_text(json.dumps({"step": 4, "data": {"position": 9}, "control": {}, "guards": {}}))
    assert _read_record(record, checkpoints / "step_000004")["data"] == {"position": 9}
    assert _read_record(record, checkpoints / "step_000006") == {}, "a later checkpoint has a cursor of its own"
    assert _read_record(record, tmp_path / "other" / "checkpoints" / "step_000004") == {}, "another run's"


# --- what a run changes of its settings ----------------------------------------------------------------------------------------------


def config(**kl) -> Config:
    return Config(algo=AlgoConfig(kl=KLConfig(**kl)), rollout=RolloutConfig(prompts_per_step=8, samples_per_prompt=4))


def test_the_adaptive_coefficient_enters_the_next_steps_settings_and_is_saved():
    cfg = config(where="loss", coef=0.2, controller="adaptive", target=0.1, horizon=1000)
    control = Control(cfg)
    assert control.settings() == cfg
    assert control.observe({"algo/ref_kl": 0.11}) == {"algo/kl_coef": 0.2}, "what the step had"
    grown = 0.2 * (1 + 0.1 * 32 / 1000)  # Ziegler et al., 32 samples
    assert control.settings().algo.kl.coef == pytest.approx(grown, rel=1e-12)
    control.raise_kl(0.5)
    resumed = Control(cfg)
    resumed.load_state_dict(json.loads(json.dumps(control.state_dict())))
    assert resumed.settings().algo.kl.coef == pytest.approx(2 * grown, rel=1e-12)
    assert resumed.observe({"algo/ref_kl": 5.0})["algo/kl_coef"] == pytest.approx(2 * grown, rel=1e-12)


def test_without_a_reference_there_is_no_coefficient_to_tell():
    control = Control(config(where="none"))
    assert control.observe({}) == {} and control.settings().algo.kl.coef == 0.001


class Optimizer:
    """All that the schedule asks of one."""

    def __init__(self, lr: float, min_lr: float):
        weight = torch.nn.Parameter(torch.zeros(1))
        self.param_groups = [{"params": [weight], "lr": 0.0, "max_lr": lr, "min_lr": min_lr, "weight_decay": 0.0}]


def rates(optimizer: Optimizer, scheduler: OptimizerParamScheduler, steps: int) -> list[float]:
    found = []
    for _ in range(steps):
        found.append(optimizer.param_groups[0]["lr"])
        scheduler.step(increment=1)
    return found


@pytest.mark.parametrize("decay", ["constant", "linear"])
def test_a_lowered_learning_rate_scales_warm_up_and_decay(decay):
    cfg = ActorConfig(lr=1e-3, min_lr=1e-4, lr_warmup_steps=2, lr_decay=decay)
    plain = Optimizer(cfg.lr, cfg.min_lr)
    expected = rates(plain, make_scheduler(plain, cfg, 8), 8)
    lowered = Optimizer(cfg.lr, cfg.min_lr)
    scheduler = make_scheduler(lowered, cfg, 8)
    found = rates(lowered, scheduler, 1)
    scale_learning_rate(lowered, scheduler, cfg, 0.5)
    found += rates(lowered, scheduler, 4)
    scale_learning_rate(lowered, scheduler, cfg, 0.25)
    found += rates(lowered, scheduler, 3)
    assert found == pytest.approx([x * f for x, f in zip(expected, [1] + [0.5] * 4 + [0.25] * 3, strict=True)], rel=1e-12)


def test_it_is_lowered_for_the_policy_and_for_the_critic_each_by_its_own_settings():
    trained = []
    for cfg in (ActorConfig(lr=1e-3), ActorConfig(lr=4e-5)):
        optimizer = Optimizer(cfg.lr, cfg.min_lr)
        trained.append(SimpleNamespace(optimizer=optimizer, scheduler=make_scheduler(optimizer, cfg, 8), config=cfg))
    control = Control(Config())
    control.lower_lr(0.5, trained)
    control.lower_lr(0.5, trained)
    assert [engine.optimizer.param_groups[0]["lr"] for engine in trained] == pytest.approx([2.5e-4, 1e-5], rel=1e-12)


def test_a_step_that_cannot_be_the_best_says_why():
    stats = {"reward/mean": 0.5, "train/loss": math.nan}
    assert _lacking("train/loss", stats) == "its train/loss is nan"
    assert _lacking("train/losss", stats) == "the step has no run.best_metric=train/losss (did you mean 'train/loss'?)"
