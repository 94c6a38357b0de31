"""tools/view_samples.py shows the samples that were asked for, in plain text."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

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


def test_wrong_arguments(run_dir: Path) -> None:
    assert "has no step 3; it has 2 to 10 (2 steps)" in view(str(run_dir), "--step", "3").stderr
    assert "no group 7 among those recorded: [0, 1]" in view(str(run_dir), "--group", "7").stderr
    assert "is nowhere a run directory" in view("nowhere").stderr
