"""A disk that is full for a while, a run directory that is gone, a tracker that fails: the run waits, or ends, and no line is torn."""

from __future__ import annotations

import errno
import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from megaflow.monitor import TRACKERS
from megaflow.monitor.metrics import read_metrics
from megaflow.trainer import disk
from megaflow.trainer.disk import RunDisk
from megaflow.trainer.status import outcome, read_status
from megaflow.types import LostError
from tests.ranks import ROOT, clean_env
from tests.unit.test_run import config, train

FULL = """
import resource, sys
from pathlib import Path
from megaflow.monitor.metrics import Metrics, replace_text
folder = Path(sys.argv[1])
metrics = Metrics(folder / "metrics.jsonl")
replace_text(folder / "status.json", "old")
resource.setrlimit(resource.RLIMIT_FSIZE, (150, resource.RLIM_INFINITY))  # the kernel refuses what goes beyond, as it does on a full disk
for step in (1, 2):
    metrics.write(step, {"a": 0.5, "b": 1.0})
for write in (lambda: metrics.write(3, {"a": 0.5, "b": 1.0}), lambda: replace_text(folder / "status.json", "new" * 100)):
    try:
        write()
    except OSError as e:
        print(e.errno, (folder / "metrics.jsonl").read_text().count("\\n"), (folder / "status.json").read_text())
resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
metrics.write(3, {"a": 0.5, "b": 1.0})
"""


def test_what_does_not_fit_leaves_no_half_line_and_no_half_file(tmp_path: Path) -> None:
    command = [sys.executable, "-c", FULL, str(tmp_path)]
    done = subprocess.run(command, env=clean_env(), cwd=ROOT, capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.splitlines() == [f"{number} 2 old" for number in (errno.ENOSPC, errno.EFBIG)]
    text = (tmp_path / "metrics.jsonl").read_text()
    assert [json.loads(line)["step"] for line in text.splitlines()] == [1, 2, 3] and text.endswith("\n")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["metrics.jsonl", "status.json"]


def run_disk(directory: Path) -> RunDisk:
    (directory / "status.json").write_text("{}")
    return RunDisk(directory, "status.json")


def failing(number: int, times: int):
    calls = []

    def write() -> int:
        calls.append(time.monotonic())
        if len(calls) <= times:
            raise OSError(number, os.strerror(number))
        return len(calls)

    return write


def test_the_run_waits_until_there_is_room_again(monkeypatch, tmp_path: Path, caplog) -> None:
    monkeypatch.setattr(disk, "PERIOD_S", 0.01)
    assert run_disk(tmp_path).patiently(failing(errno.ENOSPC, 3)) == 4
    assert "No space left on device; the run waits" in caplog.text and "can be written again" in caplog.text
    with pytest.raises(PermissionError):  # waiting does not help
        run_disk(tmp_path).patiently(failing(errno.EACCES, 1))


def test_it_does_not_wait_for_ever_and_not_for_a_directory_that_is_gone(monkeypatch, tmp_path: Path) -> None:
    monkeypatch.setattr(disk, "PERIOD_S", 0.01)
    monkeypatch.setattr(disk, "PATIENCE_S", 0.05)
    with pytest.raises(LostError, match="No space left on device for .* The last checkpoint is untouched") as error:
        run_disk(tmp_path).patiently(failing(errno.ENOSPC, 1000))
    assert outcome(error.value) == ("lost", 5)
    (tmp_path / "deleted").mkdir()
    disk_of_run = run_disk(tmp_path / "deleted")
    shutil.rmtree(tmp_path / "deleted")
    with pytest.raises(LostError, match="is gone: deleted"):
        disk_of_run.patiently(failing(errno.ENOENT, 1))


def test_a_file_system_that_is_away_is_waited_for_and_what_lies_under_it_gets_nothing(monkeypatch, tmp_path: Path) -> None:
    """Its mount point is still there, on another device, empty."""
    monkeypatch.setattr(disk, "PERIOD_S", 0.01)
    monkeypatch.setattr(disk, "PATIENCE_S", 0.05)
    mounted = tmp_path / "mounted"
    mounted.mkdir()
    away = run_disk(mounted)
    away._device += 1
    (mounted / "status.json").unlink()
    calls = []
    with pytest.raises(LostError, match="the file system is not there for .*: bring its file system back") as error:
        away.patiently(calls.append, 1)
    assert outcome(error.value) == ("lost", 5) and calls == []
    monkeypatch.setattr(disk.time, "sleep", lambda _: (mounted / "status.json").write_text("{}"))
    away.patiently(calls.append, 2)
    assert calls == [2]


def test_a_run_whose_directory_is_deleted_under_it_ends_at_once_and_makes_no_new_one(tmp_path: Path) -> None:
    began = time.monotonic()
    with pytest.raises(LostError, match="the run directory .* is gone"):
        train(config(tmp_path), lambda run, step: shutil.rmtree(run.directory) if step == 2 else None)
    assert time.monotonic() - began < 20 and not (tmp_path / "r").exists()


class Broken:
    def __init__(self, *_: object) -> None: ...

    def log(self, *_: object) -> None:
        raise ConnectionError("the service is away")

    def close(self) -> None:
        raise ConnectionError("still away")


def test_a_tracker_that_fails_costs_a_warning_and_nothing_else(monkeypatch, tmp_path: Path, capsys) -> None:
    monkeypatch.setattr(TRACKERS, "get", lambda name: Broken)
    assert train(config(tmp_path, run={"steps": 2}, monitor={"trackers": ["broken"]})) == 0
    assert read_status(tmp_path / "r/status.json")["state"] == "done"
    assert [line["step"] for line in read_metrics(tmp_path / "r/metrics.jsonl")] == [1, 2]
    told = capsys.readouterr().err
    assert "Broken did not take the metrics of step 2: ConnectionError: the service is away" in told and "did not close" in told
