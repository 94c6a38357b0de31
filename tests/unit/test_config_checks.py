"""Contradictions between sections: each has its line and says what is allowed. The batch ledger, by hand."""

from __future__ import annotations

from pathlib import Path

import pytest

from megaflow.config.checks import check
from megaflow.config.ledger import Ledger
from megaflow.config.loading import load
from megaflow.config.schema import Config
from megaflow.types import ConfigError

SOUND = """\
model: {path: m}
data:
  train:
  - path: t.jsonl
reward:
  functions:
  - name: exact
"""


@pytest.fixture(autouse=True)
def in_a_folder_with_a_sound_config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("x.yaml").write_text(SOUND)


def complaints(overrides: list[str], world_size: int = 4, ranks_per_host: int | None = None, purpose: str = "train") -> list[str]:
    with pytest.raises(ConfigError) as caught:
        check(load("x.yaml", overrides), world_size, ranks_per_host, purpose)
    assert caught.value.exit_code == 2
    return str(caught.value).splitlines()


@pytest.mark.parametrize(
    "overrides",
    [
        [],
        ["parallel.tp=2", "parallel.pp=2", "parallel.sp=true", "rollout.tp=2"],
        ["actor.mini_batch=64", "rollout.tp=4", "sampling.top_k=5"],
        ["eval.every=5", "data.eval_fraction=0.1", "run.keep_best=1", "run.best_metric=eval/heldout/accuracy"],
        ["algo.dynamic.rounds=3", "algo.dynamic.surplus=keep", "algo.drop_uniform=true", "eval.samples=4", "eval.temperature=1"],
        ["data.train=[{path: a.jsonl, weight: 2}, {path: b.jsonl, weight: 0.5}]", "algo.advantage=remax", "rollout.samples_per_prompt=1"],
        ["algo.advantage=package.module:f", "reward.functions=[{name: 'package.module:g'}]"],
        ["rollout.samples_per_prompt=1", "algo.advantage=package.module:f"],
        ["run.keep_best=1", "run.best_metric=train/my_figure", "algo.loss=package.module:f"],
        ["run.keep_best=1", "run.best_metric=reward/score_2", "reward.functions=[{name: 'a:score'}, {name: 'b:score'}]"],
        ["reward.functions=[{name: format, options: {pattern: a}}, {name: format, options: {pattern: b}}]"],
        ["run.resume=.", "algo.kl.where=reward", "actor.lr=1", "actor.min_lr=1"],
    ],
)
def test_sound(overrides: list[str]) -> None:
    check(load("x.yaml", overrides), 4)


CASES = [
    (["run.keep_best=1"], ["argument run.keep_best=1: ", "needs run.best_metric, what is best, e.g. reward/mean"]),
    (["run.best_metric=reward/mean"], ["argument run.best_metric=reward/mean", "does nothing while run.keep_best is 0"]),
    (["run.keep_best=1", "run.best_metric=reward/maen/x"], ["run.best_metric=reward/maen/x is no metric (did you mean 'reward/mean'?)"]),
    (["run.keep_best=1", "run.best_metric=reward/maen"], ["run.best_metric=reward/maen is no metric (did you mean 'reward/mean'?)"]),
    (
        ["run.keep_best=1", "run.best_metric=reward/scorre", "reward.functions=[{name: 'package.module:score'}]"],
        ["run.best_metric=reward/scorre is no metric (did you mean 'reward/score'?)"],
    ),
    (["run.keep_best=1", "run.best_metric=train/entropi"], ["run.best_metric=train/entropi is no metric (did you mean 'train/entropy'?)"]),
    (["run.keep_best=1", "run.best_metric=time/step"], ["run.best_metric=time/step is of the machine or of the run"]),
    (["run.keep_best=1", "run.best_metric=eval/sums/accuracy"], ["needs something to evaluate on"]),
    (
        ["run.keep_best=1", "run.best_metric=eval/helout/accuracy", "data.eval_fraction=0.1"],
        ["is of a set that is not evaluated; there are heldout (did you mean 'eval/heldout/accuracy'?)"],
    ),
    (
        ["run.keep_best=1", "run.best_metric=eval/heldout/accuracy", "data.eval_fraction=0.1", "eval.after=false"],
        ["is never measured after a step: eval.every=0 and eval.after=false"],
    ),
    (["run.keep_best=1", "run.best_metric=eval/heldout/pass@4", "data.eval_fraction=0.1"], ["needs eval.samples > 1"]),
    (["parallel.tp=3"], ["argument parallel.tp=3: ", "parallel.tp=3 * pp=1 * cp=1 = 3 ranks", "does not divide the 4 rank(s)"]),
    (["parallel.tp=2", "parallel.pp=4"], ["argument parallel.tp=2 and argument parallel.pp=4: ", "= 8 ranks"]),
    (["rollout.tp=3"], ["argument rollout.tp=3: rollout.tp=3 does not divide the 4 rank(s) of this job; use 1, 2 or 4"]),
    (["rollout.prompts_per_step=6", "rollout.samples_per_prompt=4", "actor.mini_batch=9"], ["mini_batch=9 does not divide the 24 samples"]),
    (["rollout.prompts_per_step=1", "rollout.samples_per_prompt=2"], ["has 2 sample(s), fewer than the 4 data-parallel ranks"]),
    (["algo.kl.where=loss", "algo.kl.coef=0"], ["algo.kl.where=loss with algo.kl.coef=0", "where=none or coef > 0"]),
    (["rollout.samples_per_prompt=1"], ["algo.advantage=grpo", "rollout.samples_per_prompt=1: all advantages are 0"]),
    (["algo.advantage=rloo", "rollout.samples_per_prompt=1", "actor.mini_batch=0"], ["algo.advantage=rloo compares samples of a prompt"]),
    (["algo.advantage=pass_at_k", "algo.pass_k=8", "rollout.samples_per_prompt=8"], ["algo.pass_k=8 must be below rollout.sam"]),
    (["algo.dynamic.factor=3"], ["algo.dynamic.rounds=0 is off, and its other keys do nothing"]),
    (["algo.dynamic.rounds=3", "algo.advantage=remax", "rollout.samples_per_prompt=1"], ["samples_per_prompt=1: no group of one does"]),
    (["algo.dynamic.rounds=3", "algo.dynamic.short=fill", "algo.drop_uniform=true"], ["fills a step with groups that algo.drop_uniform"]),
    (["algo.advantage=remax", "algo.length.form=group"], ["the greedy response of algo.advantage=remax has none; use form=linear"]),
    (["eval.samples=4"], ["argument eval.samples=4: eval.temperature=0 draws the same response eval.samples=4 times"]),
    (["eval.samples=4", "eval.temperature=1", "eval.pass_k=[1, 8]"], ["eval.pass_k=8 must be of 1 to eval.samples=4"]),
    (["data.train=[{path: a.jsonl, weight: 2}, {path: b.jsonl}]"], ["data.train.1.weight is 0 and other sources have weights"]),
    (["eval.every=5"], ["argument eval.every=5: eval.every=5 but there is nothing to evaluate on"]),
    (["data.train=[]"], ["argument data.train=[]: data.train is empty", "data.train=[{path: data/train.jsonl}]"]),
    (["data.train.0.path="], ["argument data.train.0.path=: data.train.0.path is not set"]),
    (["data.train.0.path=reasoning-gym:x"], ["data.train.0 is a procedural task and needs data.train.0.limit"]),
    (["data.train.0.options={max: 3}"], ["data.train.0.options are settings of a procedural task, and t.jsonl is a file"]),
    (["data.eval=[{path: a/x.jsonl}, {path: b/x.parquet}]"], ["data.eval.1 is called 'x' in metrics, which is data.eval.0's name too"]),
    (["data.eval=[{path: a/heldout.jsonl}]"], ["data.eval.0 is called 'heldout' in metrics, which is the program's own"]),
    (["reward.functions=[]"], ["argument reward.functions=[]: reward.functions is empty"]),
    (["reward.functions=[{name: exact}, {name: exact}]"], ["reward.functions.1: exact is there twice with the same options"]),
    (["reward.functions.0.name=exat"], ["there is no reward 'exat' (did you mean 'exact'?)", "boxed, exact, format"]),
    (["reward.functions.0.name=own.py:f"], ["reward.functions.0.name: reward 'own.py:f': no file own.py"]),
    (["algo.advantage=gpo"], ["algo.advantage: there is no advantage 'gpo' (did you mean 'grpo'?)"]),
    (["algo.loss=ppo_clp"], ["algo.loss: there is no loss 'ppo_clp' (did you mean 'ppo_clip'?)"]),
    (["rollout.backend=sglan"], ["argument rollout.backend=sglan: rollout.backend: ", "did you mean 'sglang'?"]),
    (["monitor.trackers=[tensorboard, wandb, tensorboard]"], ["argument monitor.trackers=", "tensorboard is there twice", "name it once"]),
    (["monitor.trackers=[tensorbord]"], ["monitor.trackers: there is no tracker 'tensorbord' (did you mean 'tensorboard'?)"]),
    (["parallel.sp=true"], ["argument parallel.sp=true: parallel.sp=true", "parallel.tp is 1"]),
    (["parallel.cp=3"], ["argument parallel.cp=3", "parallel.tp=1 * pp=1 * cp=3 = 3 ranks hold one copy of the actor"]),
    (["parallel.ep=3"], ["argument parallel.ep=3", "parallel.ep=3 * etp=1 * pp=1 = 3 ranks hold one copy of the experts"]),
    (["rollout.ep=2"], ["argument rollout.ep=2: rollout.ep=2 must be 1 or rollout.tp=1"]),
    (["actor.router_replay=measure", "algo.old_logp=rollout"], ["actor.router_replay=measure counts routes in a forward pass that"]),
    (["actor.min_lr=1e-3"], ["argument actor.min_lr=1e-3: actor.min_lr=0.001 is above actor.lr=1e-06"]),
    (["actor.betas=[0.9]"], ["actor.betas=[0.9] must be two numbers"]),
    (["actor.betas=[0.9, 1]"], ["actor.betas=[0.9, 1.0] must be two numbers of [0, 1)"]),
    (["sampling.temperature=0"], ["sampling.temperature=0 draws the same response every time"]),
    (["sampling.top_k=0"], ["sampling.top_k=0 must be -1 (off) or at least 1"]),
    (["run.name=a/b"], ["argument run.name=a/b: run.name='a/b' must be a folder's name"]),
    (["run.name=.."], ["run.name='..' must be a folder's name"]),
    (["run.resume=yes"], ["run.resume=yes is neither auto nor never nor an existing checkpoint folder"]),
    (["model.path="], ["argument model.path=: model.path is not set"]),
    (["model.attention=varlen", "model.dtype=float32"], ["model.attention=varlen needs 16 bits, and model.dtype=float32"]),
]


@pytest.mark.parametrize(("overrides", "parts"), CASES, ids=[" ".join(overrides) for overrides, _ in CASES])
def test_contradiction(overrides: list[str], parts: list[str]) -> None:
    (line,) = complaints(overrides)
    assert all(part in line for part in parts), line


def test_virtual_stages() -> None:
    (line,) = complaints(["parallel.vpp=2"])
    assert "parallel.vpp=2 needs parallel.pp > 1, and it is 1" in line


def test_a_file_names_its_line_and_a_default_the_file() -> None:
    Path("x.yaml").write_text(SOUND + "parallel:\n  tp: 3\n")
    assert complaints([])[0].startswith("x.yaml:9: parallel.tp=3")
    Path("x.yaml").write_text("data: {train: [{path: t}]}\n")
    assert [line.split(":")[0] for line in complaints([])] == ["x.yaml", "x.yaml"], "model.path and reward.functions are nowhere"


def test_an_engine_lives_on_one_host() -> None:
    (line,) = complaints(["rollout.tp=4"], world_size=8, ranks_per_host=2)
    assert "an engine lives on one host, and a host has 2 ranks; use 1 or 2" in line
    check(load("x.yaml", ["rollout.tp=2"]), 8, 2)


def test_evaluation_needs_sets_and_no_training_data() -> None:
    (line,) = complaints(["data.train=[]", "sampling.temperature=0"], purpose="evaluate")
    assert "there is nothing to evaluate on" in line
    check(load("x.yaml", ["data.train=[]", "data.eval=[{path: e.jsonl}]", "sampling.temperature=0"]), 4, purpose="evaluate")


def test_all_contradictions_are_told_at_once() -> None:
    assert len(complaints(["parallel.tp=3", "run.name=a/b", "actor.betas=[]", "model.path="])) == 4


def test_ledger_by_hand() -> None:
    # 8 ranks: tp 2 x pp 2, so dp 2; 6 prompts x 4 = 24 samples; mini batches of 12: 2 an epoch, 2 epochs: 4 steps, 40 in 10 RL steps
    arguments = ["parallel.tp=2", "parallel.pp=2", "rollout.tp=2", "rollout.prompts_per_step=6", "rollout.samples_per_prompt=4"]
    arguments += ["actor.mini_batch=12", "actor.epochs=2", "run.steps=10", "data.max_prompt_tokens=100", "sampling.max_new_tokens=28"]
    ledger = Ledger.of(load(None, arguments).config, 8)
    assert (ledger.data_parallel, ledger.samples, ledger.samples_per_rank, ledger.engines) == (2, 24, 12.0, 4)
    assert (ledger.prompts_per_engine, ledger.samples_per_engine) == (1.5, 6.0)
    assert (ledger.mini_batch, ledger.mini_batches, ledger.mini_batch_per_rank) == (12, 2, 6.0)
    assert (ledger.optimizer_steps, ledger.optimizer_steps_total, ledger.longest) == (4, 40, 128)
    table = ledger.table()
    rows = ["8 = tp 2 x pp 2 x dp 2", "4 of 2 rank(s)", "6, 1.5 on average an engine", "24 = 6 x 4, 6 an engine"]
    rows += ["12 samples, 6 a data-parallel rank", "4 a step, 40 in 10 steps"]
    for row in rows:
        assert row in table, table


def test_ledger_without_mini_batches_takes_the_whole_step() -> None:
    ledger = Ledger.of(Config(), 1)
    assert (ledger.mini_batch, ledger.mini_batches, ledger.optimizer_steps, ledger.samples) == (256, 1, 1, 256)
