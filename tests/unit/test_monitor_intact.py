"""Damaged files of a run: what is whole is used, what is not is named with its line, and a run that goes on loses nothing silently."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from megaflow.monitor.metrics import Metrics, read_metrics
from megaflow.monitor.recorded import read_run, read_samples, sample_steps
from megaflow.types import ConfigError

BAD_LINES = {
    b"": "empty",
    b"abc": "no JSON at character 1: Expecting value",
    b"\0\0\0\0": "no JSON at character 1",
    b'{"step": 2, "reward/me': "no JSON at character 13: Unterminated string",
    b"\xff\xfe{}": "not UTF-8",
    b'{"time": 3.0, "reward/mean": 1.0}': "no step",
    b'{"step": "2"}': "its step is '2'",
    b'{"step": true}': "its step is True",
    b'[{"step": 2}]': "no JSON object",
    b'{"step": 2, "reward/mean": "high"}': "reward/mean is 'high'",
    b'{"step": 2, "reward/mean": NaN}': "reward/mean is nan",
    b'{"step": 2, "reward/mean": 1e999}': "reward/mean is inf",
    b'{"step": 2, "reward/mean": 1' + b"0" * 400 + b"}": "reward/mean is 1000",
    b'{"step": ' + b"9" * 5000 + b"}": "no JSON: Exceeds the limit",
    b"[" * 100_000: "no JSON: maximum recursion depth",
}


def whole(step: int) -> bytes:
    return json.dumps({"step": step, "time": 1.0, "reward/mean": step / 10, "train/kl": None, "nonfinite": {"train/kl": "nan"}}).encode()


@pytest.mark.parametrize("bad", BAD_LINES, ids=list(BAD_LINES.values()))
def test_a_bad_line_of_metrics_is_left_out_and_named(bad: bytes, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b"".join(line + b"\n" for line in (whole(1), bad, whole(3))))
    assert [line["step"] for line in read_metrics(path)] == [1, 3]
    assert len(caplog.messages) == 1
    assert caplog.messages[0].startswith(f"{path}: a damaged line is left out: line 2 ({BAD_LINES[bad]}")
    assert len(caplog.messages[0]) < len(str(path)) + 200


def test_many_bad_lines_are_one_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b"x\n" * 7 + whole(8) + b"\n" + b'{"step": 9')  # the last is the torn write of a kill, which is no damage
    assert [line["step"] for line in read_metrics(path)] == [8]
    assert len(caplog.messages) == 1 and "7 damaged lines are left out: line 1 (" in caplog.messages[0]
    assert "line 5 (" in caplog.messages[0] and "line 6" not in caplog.messages[0] and caplog.messages[0].endswith("and 2 more")


def test_lines_that_a_run_drops_as_damaged_are_kept_aside_as_they_are(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b"".join(line + b"\n" for line in (whole(1), b"\xff\0", whole(2), b'{"step": ', whole(3))))
    metrics = Metrics(path, resume_step=2)
    assert path.read_bytes() == whole(1) + b"\n" + whole(2) + b"\n" and metrics.last_step == 2
    aside = tmp_path / "metrics_damaged.jsonl"
    assert aside.read_bytes() == b'\xff\0\n{"step": \n'
    assert len(caplog.messages) == 1 and "line 2 (" in caplog.messages[0] and "line 4 (" in caplog.messages[0]
    assert caplog.messages[0].endswith(f"; kept in {aside}")
    with path.open("ab") as file:
        file.write(b"later\n")
    metrics.go_back(1, tmp_path / "metrics_rolled_back.jsonl", 3, {"reward/mean": 0.3})
    assert path.read_bytes() == whole(1) + b"\n" and aside.read_bytes() == b'\xff\0\n{"step": \nlater\n'
    assert [line["step"] for line in read_metrics(tmp_path / "metrics_rolled_back.jsonl")] == [2, 3]


# --- the other files -------------------------------------------------------------------------------------------------


BAD_FILES = {"status.json": b'{"state": "do', "env.json": b"[1]", "config.yaml": b"run: [\n"}


@pytest.mark.parametrize("content", [None, b"", b"\xff\0", b"- 1\n"], ids=["its own", "empty", "binary", "a list"])
@pytest.mark.parametrize("name", BAD_FILES)
def test_a_run_can_be_looked_at_without_them(name: str, content: bytes | None, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "metrics.jsonl").write_bytes(whole(1) + b"\n")
    (tmp_path / name).write_bytes(BAD_FILES[name] if content is None else content)
    run = read_run(tmp_path)
    assert (run.config, run.status, run.env) == ({}, {}, {})
    assert len(caplog.messages) == 1 and caplog.messages[0].startswith(f"{tmp_path / name} is damaged: "), caplog.messages


def test_metrics_that_cannot_be_read_are_an_error_and_no_traceback(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").mkdir()
    with pytest.raises(ConfigError, match=r"metrics.jsonl cannot be read: Is a directory"):
        read_run(tmp_path)


SAMPLE = {
    "id": "sums:1", "group": 0, "index": 0, "prompt": "1+1?", "answer": None, "response": "2", "reward": 1, "parts": {"exact": 1.0},
    "advantage": 0.5, "response_tokens": 1, "finish": "stop",
}  # fmt: skip


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"reward": None}, "its reward is None"),
        ({"group": "a"}, "its group is 'a'"),
        ({"parts": {"exact": "no"}}, "exact of its parts is 'no'"),
    ],
)
def test_samples_that_no_tool_can_show_are_left_out(changed: dict, reason: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "step_1.jsonl"
    lines = [SAMPLE, SAMPLE | changed, {name: value for name, value in SAMPLE.items() if name != "finish"}]
    path.write_text("\n".join([*map(json.dumps, lines), json.dumps(SAMPLE)[:40]]))
    assert read_samples(path) == [SAMPLE]
    assert f"3 damaged lines are left out: line 2 ({reason}), line 3 (no finish), line 4 (no JSON" in caplog.text


def test_a_line_of_samples_ends_at_its_newline_only(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Samples are written with the model's own characters, and Python's splitlines also splits at these."""
    odd = SAMPLE | {"response": "a\u2028b\u2029c\x85d"}
    (tmp_path / "step_1.jsonl").write_text(json.dumps(odd, ensure_ascii=False) + "\n")
    assert read_samples(tmp_path / "step_1.jsonl") == [odd] and not caplog.messages


def test_files_that_are_no_steps_are_named_and_left_out(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "samples").mkdir()
    for name in ("step_10", "step_9", "step_x", "step_", "step_010", "step_1_0", "eval_sums"):
        (tmp_path / f"samples/{name}.jsonl").touch()
    assert sample_steps(tmp_path) == [9, 10]
    assert len(caplog.messages) == 1
    assert all(f"{name}.jsonl" in caplog.messages[0] for name in ("step_x", "step_", "step_010", "step_1_0"))
    assert "eval_sums" not in caplog.messages[0]
