"""A run's life on one rank: what it writes, when it saves and stops, and what status.json says of each ending."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megaflow.config.schema import Config
from megaflow.trainer.run import Run
from megaflow.trainer.status import outcome, read_status, state_of_exit_code
from megaflow.types import ConfigError, DivergedError, PreflightError, Prompt, Sample, UserError


class Watch:
    """Of a mesh of one rank: nobody to tell, but what was told is kept."""

    def __init__(self) -> None:
        self.reports: list[tuple[str, int]] = []
        self.on_peer_error: Callable[[str, int], None] = lambda message, code: None

    def report(self, message: str, exit_code: int) -> None:
        self.reports.append((message, exit_code))

    def cause(self, error: BaseException) -> None:
        return None


class OneRank:
    rank, world_size = 0, 1

    def __init__(self) -> None:
        self.watch = Watch()

    def on_rank0(self, fn: Callable[..., Any], *args: Any) -> Any:
        return fn(*args)

    def all_gather(self, value: Any) -> list[Any]:
        return [value]

    def barrier(self) -> None:
        return None


def config(root: Path, **sections: dict[str, Any]) -> Config:
    cfg = Config()
    sections["run"] = {"root": str(root), "name": "r", "steps": 5, "save_every": 2} | sections.get("run", {})
    sections["monitor"] = {"plot": False} | sections.get("monitor", {})
    return dataclasses.replace(cfg, **{name: dataclasses.replace(getattr(cfg, name), **values) for name, values in sections.items()})


def find(path: Path) -> tuple[int, Path] | None:
    return max([(int(p.name.removeprefix("step_")), p) for p in path.glob("step_*")], default=None)


def write_checkpoint(checkpoints: Path, step: int) -> None:
    (checkpoints / f"step_{step}").mkdir()


def train(cfg: Config, on_step: Callable[[Run, int], None] = lambda run, step: None) -> int:
    """The shape of the real loop."""
    with Run.open(cfg, OneRank(), find) as run:
        for step in run.steps():
            with run.phase("update"):
                on_step(run, step)
            run.log(step, {"reward/mean": step / 10, "batch/tokens": 100.0})
            if run.due("save", step):
                with run.phase("save"):
                    write_checkpoint(run.checkpoints_dir, step)
                run.saved(step)
        return run.finish()


def steps_in(directory: Path) -> list[int]:
    return [json.loads(line)["step"] for line in (directory / "metrics.jsonl").read_text().splitlines()]


def status(root: Path) -> dict[str, Any]:
    return json.loads((root / "r/status.json").read_text())


def test_a_run_to_its_end(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert train(config(tmp_path, monitor={"plot": True, "trackers": ["tensorboard"]})) == 0
    directory = tmp_path / "r"
    assert steps_in(directory) == [1, 2, 3, 4, 5]
    assert sorted(p.name for p in (directory / "checkpoints").iterdir()) == ["step_2", "step_4", "step_5"]
    now = status(tmp_path)
    assert (now["state"], now["exit_code"], now["step"], now["checkpoint"], now["pid"]) == ("done", 0, 5, 5, os.getpid())
    env = json.loads((directory / "env.json").read_text())
    assert env["versions"]["torch"] == torch.__version__.split("+")[0] and env["ranks"] == 1 and env["devices"]["cpus"] == os.cpu_count()
    for name in ("config.yaml", "curve.png", "samples", "logs/rank_0.log", "tensorboard"):
        assert (directory / name).exists(), name
    out = capsys.readouterr().out
    assert "step 5/5 reward 0.500" in out and f"learning curve: {directory}/curve.png" in out and "done: 5 steps" in out
    assert "step 5/5 reward 0.500" in (directory / "logs/rank_0.log").read_text()


def test_prometheus_while_it_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The endpoint's address is in status.json; the endpoint ends with the run, also with one that fails."""
    pages: list[str] = []

    def look(run: Run, step: int) -> None:
        with urllib.request.urlopen(status(tmp_path)["prometheus"], timeout=5) as answer:
            pages.append(answer.read().decode())
        if step == 3:
            raise ValueError("enough")

    with pytest.raises(ValueError, match="enough"):
        train(config(tmp_path, monitor={"prometheus_port": 0}), look)
    assert [f'megaflow_step{{run="r"}} {step}.0' in page for step, page in enumerate(pages)] == [True] * 3
    assert 'megaflow_reward_mean{run="r"} 0.2' in pages[2] and 'megaflow_status{megaflow_status="running",run="r"} 1.0' in pages[2]
    url = status(tmp_path)["prometheus"]
    assert url.startswith("http://127.0.0.1:") and f"metrics for Prometheus: {url}" in capsys.readouterr().out
    with pytest.raises(OSError, match="refused"):
        urllib.request.urlopen(url, timeout=5)


def test_log_adds_times_memory_and_tokens_per_second(tmp_path: Path) -> None:
    train(config(tmp_path, run={"steps": 2}))
    lines = [json.loads(line) for line in (tmp_path / "r/metrics.jsonl").read_text().splitlines()]
    assert 0 < lines[0]["time/update"] < lines[0]["time/step"] < 5
    assert lines[0]["perf/tokens_per_s"] == pytest.approx(100 / lines[0]["time/step"])
    assert 0.01 < lines[0]["mem/peak_gb"] < 100
    assert "time/save" not in lines[0]


def test_what_is_due(tmp_path: Path) -> None:
    cfg = config(tmp_path, run={"steps": 7, "save_every": 3}, eval={"every": 4, "before": True, "after": False})
    with Run.open(cfg, OneRank(), find) as run:
        assert [step for step in range(8) if run.due("eval", step)] == [0, 4]
        saves = [step for step in run.steps() if run.due("save", step)]
        assert saves == [3, 6, 7]
        assert [step for step in (7, 8) if run.due("eval", step)] == [8]
        run.finish()


def test_save_only_where_asked(tmp_path: Path) -> None:
    train(config(tmp_path, run={"save_every": 0, "save_final": False}))
    assert not list((tmp_path / "r/checkpoints").iterdir())


def test_killed_and_resumed(tmp_path: Path) -> None:
    """The error stands for a kill: both leave steps after the last checkpoint."""

    def fail(run: Run, step: int) -> None:
        if step == 4:
            raise ValueError("the disk is on fire")

    with pytest.raises(ValueError):
        train(config(tmp_path), fail)
    now = status(tmp_path)
    assert (now["state"], now["exit_code"], now["message"], now["step"]) == ("crashed", 1, "ValueError: the disk is on fire", 3)
    assert "the disk is on fire" in (tmp_path / "r/logs/rank_0.log").read_text()
    begun: list[int] = []
    assert train(config(tmp_path), lambda run, step: begun.append(step)) == 0
    assert begun == [3, 4, 5] and steps_in(tmp_path / "r") == [1, 2, 3, 4, 5]
    assert status(tmp_path)["state"] == "done"


def test_a_run_goes_on_over_a_damaged_line_of_its_metrics(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    train(config(tmp_path))
    path = tmp_path / "r/metrics.jsonl"
    lines = path.read_bytes().splitlines()
    path.write_bytes(b"\n".join([*lines[:2], b"\0\0", *lines[3:], b"no line", b""]))
    assert train(config(tmp_path, run={"steps": 7}, monitor={"plot": True})) == 0
    assert steps_in(tmp_path / "r") == [1, 2, 4, 5, 6, 7] and status(tmp_path)["state"] == "done"
    assert (tmp_path / "r/metrics_damaged.jsonl").read_bytes() == b"\0\0\nno line\n"
    for said in (capsys.readouterr().err, (tmp_path / "r/logs/rank_0.log").read_text()):
        assert said.count("2 damaged lines are left out: line 3 (") == 1 and "line 6 (" in said and "metrics_damaged.jsonl" in said


def test_a_finished_run_is_left_as_it_is(tmp_path: Path) -> None:
    train(config(tmp_path))
    before = (tmp_path / "r/status.json").read_text()
    with pytest.raises(ConfigError, match="finished"):
        train(config(tmp_path))
    assert (tmp_path / "r/status.json").read_text() == before and steps_in(tmp_path / "r") == [1, 2, 3, 4, 5]
    assert train(config(tmp_path, run={"steps": 6})) == 0
    assert steps_in(tmp_path / "r") == [1, 2, 3, 4, 5, 6]


def test_stop_file_saves_at_the_end_of_the_step(tmp_path: Path) -> None:
    def ask(run: Run, step: int) -> None:
        if step == 3:
            (tmp_path / "r/STOP").touch()

    assert train(config(tmp_path), ask) == 75
    now = status(tmp_path)
    assert (now["state"], now["exit_code"], now["step"], now["checkpoint"]) == ("stopped", 75, 3, 3) and "STOP" in now["message"]
    assert not (tmp_path / "r/STOP").exists()  # or the next start would stop at once
    assert train(config(tmp_path)) == 0
    assert steps_in(tmp_path / "r") == [1, 2, 3, 4, 5]


def test_a_stop_file_left_behind_is_removed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "r").mkdir()
    (tmp_path / "r/STOP").touch()
    assert train(config(tmp_path)) == 0
    assert "removed a STOP file" in capsys.readouterr().out


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_signals_save_at_the_end_of_the_step(tmp_path: Path, number: signal.Signals) -> None:
    handler = signal.getsignal(number)

    def ask(run: Run, step: int) -> None:
        if step == 3:
            os.kill(os.getpid(), number)
            os.kill(os.getpid(), number)  # torchrun passes on what the terminal has sent already

    assert train(config(tmp_path), ask) == 75
    assert status(tmp_path)["message"] == number.name and status(tmp_path)["checkpoint"] == 3
    assert signal.getsignal(number) is handler  # given back


def test_a_second_ctrl_c_ends_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("megaflow.trainer.stop.SAME_REQUEST_S", -1.0)  # the second one comes long after

    def ask(run: Run, step: int) -> None:
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        train(config(tmp_path), ask)
    assert (status(tmp_path)["state"], status(tmp_path)["exit_code"]) == ("crashed", 130)


def test_stopped_in_the_last_step_is_done(tmp_path: Path) -> None:
    def ask(run: Run, step: int) -> None:
        if step == 5:
            (tmp_path / "r/STOP").touch()

    assert train(config(tmp_path), ask) == 0
    assert status(tmp_path)["state"] == "done" and not (tmp_path / "r/STOP").exists()


def test_data_that_ends_early(tmp_path: Path) -> None:
    assert train(config(tmp_path), lambda run, step: run.end_after(3) if step == 3 else None) == 0
    assert steps_in(tmp_path / "r") == [1, 2, 3] and (tmp_path / "r/checkpoints/step_3").exists()


@pytest.mark.parametrize(
    ("error", "state", "code"),
    [
        (ConfigError("a"), "config", 2),
        (PreflightError("a"), "preflight", 3),
        (DivergedError("a"), "diverged", 4),
        (RuntimeError("a"), "crashed", 1),
        (KeyboardInterrupt(), "crashed", 130),
    ],
)
def test_endings(tmp_path: Path, error: BaseException, state: str, code: int) -> None:
    assert outcome(error) == (state, code)
    if code < 100:
        assert state_of_exit_code(code) == state
    mesh = OneRank()
    with pytest.raises(type(error)), Run.open(config(tmp_path), mesh, find):
        raise error
    assert (status(tmp_path)["state"], status(tmp_path)["exit_code"]) == (state, code)
    text = {1: "RuntimeError: a", 130: "KeyboardInterrupt"}.get(code, "a")
    assert mesh.watch.reports == [(text, code)]


def test_an_error_of_another_rank_is_written_and_the_first_word_stands(tmp_path: Path) -> None:
    mesh = OneRank()
    with pytest.raises(RuntimeError), Run.open(config(tmp_path), mesh, find):
        mesh.watch.on_peer_error("rank 1 failed: out of memory", 4)
        raise RuntimeError("connection closed by peer")  # the echo
    assert (status(tmp_path)["state"], status(tmp_path)["message"]) == ("diverged", "rank 1 failed: out of memory")


def test_a_missing_tracker_is_a_config_error_in_the_status(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no tracker 'nosuch'"):
        train(config(tmp_path, monitor={"trackers": ["nosuch"]}))
    assert (status(tmp_path)["state"], status(tmp_path)["exit_code"]) == ("config", 2)
    assert train(config(tmp_path)) == 0  # nothing was trained: the directory is free


def test_leaving_without_finish_is_a_bug(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match=r"without run.finish\(\)"), Run.open(config(tmp_path), OneRank(), find):
        pass


def test_samples_are_written_group_by_group(tmp_path: Path) -> None:
    def sample(group: int, index: int, advantage: float | torch.Tensor) -> Sample:
        prompt = Prompt("addition:3", [5, 6, 7], "1+2=", answer=3)
        tokens = torch.tensor([8, 9])
        reward = {"reward": 1.0, "reward_parts": {"exact": 1.0}, "advantage": advantage}
        return Sample(prompt, group, index, tokens, torch.zeros(2), "stop", 4, "3", **reward)

    def write(run: Run, step: int) -> None:
        run.write_samples(step, [sample(1, 0, 0.0), sample(0, 1, torch.tensor([0.5, 1.0])), sample(0, 0, 0.25)])

    train(config(tmp_path, run={"steps": 1}, monitor={"samples_per_step": 2}), write)
    lines = [json.loads(line) for line in (tmp_path / "r/samples/step_1.jsonl").read_text().splitlines()]
    assert [(line["group"], line["index"], line["advantage"]) for line in lines] == [(0, 0, 0.25), (0, 1, 0.75)]
    assert lines[0] == {
        "id": "addition:3", "group": 0, "index": 0, "prompt": "1+2=", "response": "3", "answer": 3, "reward": 1.0, "parts": {"exact": 1.0},
        "advantage": 0.25, "prompt_tokens": 3, "response_tokens": 2, "finish": "stop", "version": 4,
    }  # fmt: skip


KILLED = """
import os, signal, sys
sys.path.insert(0, sys.argv[2])
from pathlib import Path
from test_run import config, train
train(config(Path(sys.argv[1])), lambda run, step: os.kill(os.getpid(), signal.SIGKILL) if step == 4 else None)
"""


def test_kill_minus_nine_leaves_a_directory_that_resumes(tmp_path: Path) -> None:
    killed = subprocess.run([sys.executable, "-c", KILLED, str(tmp_path), str(Path(__file__).parent)], capture_output=True, timeout=60)
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    assert read_status(tmp_path / "r/status.json")["state"] == "running" and steps_in(tmp_path / "r") == [1, 2, 3]
    assert train(config(tmp_path)) == 0
    assert steps_in(tmp_path / "r") == [1, 2, 3, 4, 5]


def test_a_run_that_diverges_finishes_its_save_first_and_one_that_crashes_does_not(tmp_path: Path) -> None:
    """Only an error that all ranks have at the same place leaves them able to do something together."""
    for error, expected in ((DivergedError("nan"), ["saved"]), (ValueError("x"), [])):
        done: list[str] = []

        def fail(run: Run, step: int, error: Exception = error, done: list[str] = done) -> None:
            run.before_diverging = lambda: done.append("saved")
            raise error

        with pytest.raises(type(error)):
            train(config(tmp_path, run={"name": type(error).__name__}), fail)
        assert done == expected


def test_a_save_that_fails_at_such_an_end_is_told_and_the_end_stays_what_it_was(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def fail(run: Run, step: int) -> None:
        def full() -> None:
            raise UserError("the disk is full")

        run.before_diverging = full
        raise DivergedError("nan")

    with pytest.raises(DivergedError):
        train(config(tmp_path), fail)
    assert "the disk is full" in capsys.readouterr().out
    assert (status(tmp_path)["state"], status(tmp_path)["exit_code"]) == ("diverged", 4)


def test_the_best_is_in_the_status_and_told_at_the_end(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    best = SimpleNamespace(step=2, path=tmp_path / "r/checkpoints/step_2", metric="eval/sums/accuracy", value=0.75)
    assert train(config(tmp_path), lambda run, step: run.saved(step, best) if step == 2 else None) == 0
    assert status(tmp_path)["best"] == {"step": 2, "metric": "eval/sums/accuracy", "value": 0.75, "path": str(best.path)}
    assert f"best checkpoint: {best.path} (eval/sums/accuracy 0.75)" in capsys.readouterr().out
    assert status(tmp_path)["checkpoint"] == 5
