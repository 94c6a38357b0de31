"""Injected faults: a learning rate that explodes, rewards that collapse, a loss that turns nan. The run mends itself and goes on.

With the hf backend on one rank; what each guard sees is held by unit/test_guards.py.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch

from tests.e2e.program import TRAIN, metrics, run, samples, status, write_config
from tests.ranks import PROGRAMS
from tools.make_tiny_model import make

pytestmark = pytest.mark.timeout(600)


def test_three_faults_then_a_kill_right_after_going_back(tmp_path: Path) -> None:
    make(tmp_path / "model", data=tmp_path / "data", steps=0)
    functions = PROGRAMS / "rewards.py"
    config = write_config(
        tmp_path / "faults.yaml",
        tmp_path,
        parallel={"tp": 1},
        run={"steps": 4, "save_every": 2, "keep_last": 3},
        algo={"loss": f"{functions}:nan_for_a_while", "kl": {"where": "loss", "controller": "adaptive", "target": 0.01, "horizon": 100}},
        actor={"lr": 0.02, "max_skipped": 2},
        reward={"functions": [{"name": f"{functions}:collapses"}]},
        guard={"step_kl": 0.05, "step_kl_action": "lower_lr", "factor": 0.01, "cooldown": 50, "reward_drop": 0.5, "reward_window": 1,
               "reward_drop_action": "rollback", "nonfinite_action": "rollback"},
    )  # fmt: skip
    directory = tmp_path / "runs" / "faults"
    code, output = run(tmp_path, 1, TRAIN, "--config", config)
    assert code == 0, output[-3000:]
    assert [(e["step"], e["guard"], e["action"]) for e in status(directory)["guard"] if e["action"] != "warn"] == [
        (1, "step_kl", "lower_lr"),
        (4, "reward_drop", "rollback"),  # to step 2
        (3, "nonfinite", "rollback"),  # step 2 has been gone back to already: to the beginning
    ]
    for text in ("train/kl is", "below its best", "not finite", "went back from step 4 to the checkpoint of step 2"):
        assert text in output

    lines = metrics(directory)
    assert [line["step"] for line in lines] == [0, 1, 2, 3, 4], "each step once"
    assert [line["guard/rollbacks"] for line in lines[1:]] == [2.0] * 4 and lines[-1]["guard/actions"] == 3
    assert all(line["train/lr"] == pytest.approx(0.02 * 0.01) and line["guard/lr_scale"] == 0.01 for line in lines[1:])
    assert all(line["train/skipped"] == 0 and line["reward/mean"] > 0.5 for line in lines[1:])
    assert lines[1]["algo/kl_coef"] == 0.001 and lines[2]["algo/kl_coef"] == pytest.approx(0.001 * (1 - 0.2 * 16 / 100)), "restored"
    gone = [json.loads(line) for line in (directory / "metrics_rolled_back.jsonl").read_text().splitlines()]
    assert [(line["step"], line["rolled_back_to"]) for line in gone] == [(3, 2), (4, 2), (1, 0), (2, 0), (3, 0)]
    assert gone[1]["reward/mean"] == 0 and gone[4]["train/loss"] is None and gone[0]["train/lr"] == pytest.approx(2e-4)

    kept = quarantined(directory / "quarantine" / "step_4")
    texts = read(directory / "quarantine" / "step_4" / "samples.jsonl")
    assert kept == {(line["group"], line["index"]) for line in texts} and len(kept) == 16
    assert json.loads((directory / "quarantine" / "step_4" / "reason.json").read_text())[-1]["guard"] == "reward_drop"
    assert (directory / "quarantine" / "step_3" / "step_000002" / "manifest.json").exists(), "the checkpoint that was given up"

    seen = {line["id"] for name in ("step_3", "step_4") for line in read(directory / "quarantine" / name / "samples.jsonl")}
    trained = samples(directory)
    assert not seen & {line["id"] for lines in trained.values() for line in lines}, "what went wrong does not come again"

    for step in (2, 4):  # as a kill before the first checkpoint after the second rollback would have left it
        shutil.rmtree(directory / "checkpoints" / f"step_{step:06d}")
    code, output = run(tmp_path, 1, TRAIN, "--config", config, "run.steps=5", "algo.loss=ppo_clip")
    assert code == 0 and f"resuming from {directory}/checkpoints/step_000000" in output, output[-3000:]
    again = metrics(directory)
    assert [line["step"] for line in again] == [0, 1, 2, 3, 4, 5] and again[1]["guard/actions"] == 3 and again[1]["guard/lr_scale"] == 0.01
    ids = {name: [line["id"] for line in lines] for name, lines in trained.items()}
    assert [line["id"] for line in samples(directory)["step_1.jsonl"]] == ids["step_1.jsonl"], "the same prompts as after going back"


def read(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def quarantined(place: Path) -> set[tuple[int, int]]:
    """Which samples' tokens and log-probabilities are there, and whole."""
    found = [s for path in place.glob("tokens_*.pt") for s in torch.load(path, weights_only=True)]
    for s in found:
        assert len(s["response"]) == len(s["old_logp"]) == len(s["rollout_logp"]) == len(s["ref_logp"]) > 0 and s["prompt"]
    return {(s["group"], s["index"]) for s in found}
