"""metrics.jsonl is strict JSON, has each step once over kills and resumes, and every name in it is documented."""

from __future__ import annotations

import ast
import json
import re
from pathlib import Path

import pytest

from megaflow.monitor.metrics import METRICS, Metrics, describe, read_metrics

# the names that were promised to users
PROMISED = """
reward/mean reward/std rollout/len_mean rollout/truncated rollout/tokens_per_s train/loss train/kl train/clip_frac train/entropy
train/grad_norm train/lr mismatch/logp_abs_diff mismatch/k3 sync/bytes sync/gb_per_s sync/version sync/proof time/step time/sync
time/rollout time/logprob time/logic time/update time/save perf/tokens_per_s perf/tokens_per_s_per_rank mem/peak_gb
mem/after_sleep_gb eval/addition/accuracy reward/failed reward/timeout reward/exact train/skipped train/k3
""".split()


@pytest.mark.parametrize("name", PROMISED)
def test_promised_names_are_documented(name: str) -> None:
    assert describe(name)


def test_unknown_names_are_not() -> None:
    assert describe("trian/kl") is None and describe("eval/addition") is None and describe("eval/a/b/accuracy") is None
    assert all(METRICS.values())


def refuse_constant(text: str) -> None:
    raise AssertionError(f"{text} is no JSON")


def test_lines_are_strict_json(tmp_path: Path) -> None:
    metrics = Metrics(tmp_path / "metrics.jsonl")
    metrics.write(1, {"train/loss": float("nan"), "train/kl": float("-inf"), "reward/mean": 0.25})
    line = json.loads((tmp_path / "metrics.jsonl").read_text(), parse_constant=refuse_constant)
    assert line.pop("time") > 1.7e9
    assert line == {
        "step": 1, "train/loss": None, "train/kl": None, "reward/mean": 0.25, "nonfinite": {"train/loss": "nan", "train/kl": "-inf"}
    }  # fmt: skip


def test_a_written_line_is_there_at_once(tmp_path: Path) -> None:
    metrics = Metrics(tmp_path / "metrics.jsonl")
    metrics.write(1, {"reward/mean": 0.5})
    assert [line["step"] for line in read_metrics(tmp_path / "metrics.jsonl")] == [1]  # not closed: as after a kill


def test_resume_drops_the_abandoned_steps_and_a_torn_line(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    first = Metrics(path)
    for step in range(5):
        first.write(step, {"reward/mean": step / 10})
    with path.open("a") as file:
        file.write('{"step": 5, "reward/me')  # killed while writing
    resumed = Metrics(path, resume_step=2)
    resumed.write(3, {"reward/mean": 9.0})
    assert [(line["step"], line["reward/mean"]) for line in read_metrics(path)] == [(0, 0.0), (1, 0.1), (2, 0.2), (3, 9.0)]
    assert list(tmp_path.iterdir()) == [path]  # no temporary file stays


def test_starting_over_empties_the_file(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 7}\n')
    Metrics(path)
    assert read_metrics(path) == []


def test_a_step_cannot_be_written_twice(tmp_path: Path) -> None:
    metrics = Metrics(tmp_path / "metrics.jsonl")
    metrics.write(3, {})
    with pytest.raises(AssertionError, match="each step once"):
        metrics.write(3, {})


def test_every_name_in_the_program_is_documented() -> None:
    """Names written out in the source; `train/<name>`, `reward/<fn>` and others are made of parts and not seen here."""
    prefixes = "|".join({name.split("/")[0] for name in METRICS})
    found = {}
    for path in sorted((Path(__file__).parents[2] / "megaflow").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and re.fullmatch(rf"({prefixes})/[a-z]\w*", node.value):
                found[node.value] = path.name
    assert "sync/proof" in found and "train/grad_norm" in found
    assert not {name: where for name, where in found.items() if not describe(name)}
