"""tools/view_samples.py shows the samples that were asked for, in plain text."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from megaflow.trainer.evaluate import _keep_samples
from megaflow.types import Prompt, Sample
from tools import view_samples

TOOL = Path(__file__).parents[2] / "tools/view_samples.py"


def line(group: int, index: int, reward: float) -> dict[str, Any]:
    return {
        "id": f"addition:{group}", "group": group, "index": index, "prompt": f"Add {group}+1.",
        "response": f"it is\n{index}\x1b[2J",
        "answer": group + 1, "reward": reward, "parts": {"exact": reward}, "advantage": reward - 0.5, "prompt_tokens": 4,
        "response_tokens": 6, "finish": "length" if index else "stop", "version": 3,
    }  # fmt: skip


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    (tmp_path / "samples").mkdir()
    rows = [line(0, 0, 1.0), line(0, 1, 0.25), line(1, 0, 0.0), line(1, 1, 0.75)]
    for step in (2, 10):
        (tmp_path / f"samples/step_{step}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return tmp_path


def view(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, str(TOOL), *arguments], capture_output=True, text=True, timeout=30)


def rewards(text: str) -> list[str]:
    return [row.split("reward ")[1].split()[0] for row in text.splitlines() if "] reward" in row]


def test_last_step_group_by_group(run_dir: Path) -> None:
    out = view(str(run_dir)).stdout
    assert "step 10: 4 of 4 recorded samples, whose mean reward is 0.500" in out
    assert rewards(out) == ["1", "0.25", "0", "0.75"] and out.count("> Add") == 2
    assert "  [1] reward 0.25 (exact=0.25)  advantage -0.250  6 tokens, truncated\n      it is\n      1\\x1b[2J\n" in out
    assert "\x1b" not in out  # no colours into a pipe, and what the model wrote cannot move the cursor


def test_best_worst_and_group(run_dir: Path) -> None:
    assert rewards(view(str(run_dir), "--best", "1", "--worst", "2").stdout) == ["1", "0.25", "0"]
    assert rewards(view(str(run_dir), "--group", "1", "--step", "2").stdout) == ["0", "0.75"]
    assert rewards(view(str(run_dir), "--best", "9", "--worst", "9").stdout) == ["1", "0.75", "0.25", "0"]  # each once


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--step", "3"], "has no step 3; it has 2 to 10 (2 steps)"),
        (["--group", "7"], "step 10 has no group 7 among those recorded: [0, 1]"),
        (["--eval", "sums"], "has no eval_sums.jsonl; launch/evaluate.py writes it"),
    ],
)
def test_wrong_arguments(run_dir: Path, arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert view_samples.main([str(run_dir), *arguments]) == 2
    out, error = capsys.readouterr()
    assert said in error and not out


@pytest.mark.parametrize("arguments", [["--best", "-1"], ["--worst", "-2"], ["--best", "x"], ["--step", "2", "--eval", "sums"]])
def test_arguments_that_are_none(run_dir: Path, arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        view_samples.main([str(run_dir), *arguments])
    assert f"argument {arguments[-2]}: " in capsys.readouterr().err


def test_nothing_to_show(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (run_dir / "samples/step_11.jsonl").touch()
    assert view_samples.main([str(run_dir)]) == 2
    assert f"{run_dir}/samples/step_11.jsonl has no samples to show" in capsys.readouterr().err
    done = view("nowhere")
    assert done.returncode == 2 and "is nowhere a run directory" in done.stderr


def test_a_damaged_line_is_left_out_with_a_warning(run_dir: Path) -> None:
    path = run_dir / "samples/step_10.jsonl"
    path.write_text(path.read_text()[:-30])
    (run_dir / "samples/step_x.jsonl").touch()
    done = view(str(run_dir))
    assert done.returncode == 0 and rewards(done.stdout) == ["1", "0.25", "0"] and "3 of 3 recorded samples" in done.stdout
    assert "step_x.jsonl: left out" in done.stderr and f"{path}: a damaged line is left out: line 4 (no JSON" in done.stderr


def test_samples_of_an_eval_set(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """As an evaluation by itself writes them, in a directory where no step was made."""
    answers = [Sample(Prompt(f"sums:{i}", [1], f"{i}+1?", i + 1), i, 0, None, None, "stop", 0, text=f"it is {i}") for i in range(2)]
    answers[1].reward, answers[1].reward_parts = 1.0, {"number": 1.0}
    _keep_samples(tmp_path, "sums", answers)
    assert view_samples.main([str(tmp_path), "--eval", "sums"]) == 0
    out = capsys.readouterr().out
    assert "eval set sums: 2 of 2 recorded samples, whose mean reward is 0.500" in out and rewards(out) == ["0", "1"]
    assert "> 1+1?" in out and "it is 1" in out
    assert view_samples.main([str(tmp_path), "--eval", "sum"]) == 2 and "it has sums" in capsys.readouterr().err
    assert view_samples.main([str(tmp_path)]) == 2 and "it has samples of eval sets: --eval sums" in capsys.readouterr().err
