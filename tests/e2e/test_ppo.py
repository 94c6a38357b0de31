"""PPO as a user runs it, with a reward model on the mesh: the critic learns beside the policy, and after kill -9 the run goes on bit for
bit, with the critic and the moments that scores are normalised by."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests import tiny
from tests.e2e.program import Program, last_step, metrics, run, samples, status, write_config
from tools.make_tiny_model import make

pytestmark = pytest.mark.timeout(400)
PPO = "launch/train_ppo.py"
TIMED = ("time", "perf/", "mem/", "sync/", "save/", "rollout/tokens_per_s")


def measured(lines: list[dict]) -> list[dict]:
    """Without what a clock or the memory says."""
    return [{name: value for name, value in line.items() if not name.startswith(TIMED)} for line in lines]


def test_kill_9_and_resume_is_bitwise_and_the_critic_learns(tmp_path: Path) -> None:
    """The steps that the killed run made after its checkpoint are made again, from the checkpoint, with the same numbers and samples."""
    make(tmp_path / "model", data=tmp_path / "data")
    scorer = tiny.reward_model_folder(tmp_path / "scorer")
    config = write_config(
        tmp_path / "ppo.yaml", tmp_path,
        parallel={"tp": 1}, run={"steps": 4000, "save_every": 3, "keep_last": 9},
        algo={"advantage": "gae", "gae": {"lam": 0.95, "bootstrap": True}, "kl": {"where": "reward", "estimator": "k1", "coef": 0.01}},
        reward={"model": {"path": scorer, "normalize": True, "clip": 2.0, "weight": 0.1}},
        critic={"lr": 1e-2, "warmup_steps": 1}, rollout={"prompts_per_step": 16, "samples_per_prompt": 1},
    )  # fmt: skip
    directory = tmp_path / "runs" / "ppo"
    with Program(tmp_path / "first.log", 1, PPO, "--config", config, launcher=False) as first:
        saved = directory / "checkpoints" / "step_000003"
        first.wait_until(lambda: last_step(directory) >= 5 and saved.is_dir(), 200, "step 5")
        assert first.kill_9() == []
    straight, drawn = measured(metrics(directory)), samples(directory)
    for later in sorted((directory / "checkpoints").iterdir())[1:]:
        shutil.rmtree(later)
    code, output = run(tmp_path, 1, PPO, "--config", config, "run.steps=5")
    assert code == 0 and "goes on after step 3" in output, output[-3000:]
    assert status(directory)["state"] == "done"
    assert measured(metrics(directory)) == straight[:6]
    again = samples(directory)
    assert all(again[f"step_{n}.jsonl"] == drawn[f"step_{n}.jsonl"] for n in range(1, 6))

    warm_up, second = straight[1], straight[2]
    assert "train/loss" not in warm_up and warm_up["critic/grad_norm"] > 0, "at first only the critic learns"
    assert second["train/optimizer_steps"] == 2 and second["critic/optimizer_steps"] == 2 and second["critic/lr"] == 1e-2
    assert warm_up["critic/value_mean"] == 0.0 and abs(straight[5]["critic/value_mean"]) > 0, "the head starts at 0"
    assert 0 < abs(warm_up["reward/model"]) != abs(second["reward/model"]) > 0
    assert warm_up["reward/kl_penalty"] == 0.0 and second["reward/kl_penalty"] == 0.0 and straight[5]["reward/kl_penalty"] != 0.0
