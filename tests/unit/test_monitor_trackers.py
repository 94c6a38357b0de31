"""What was logged, read back from each tracker's own files; a tracker whose package is missing says how to install it."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest

from megaflow.config.schema import Config
from megaflow.monitor import TRACKERS
from megaflow.monitor.trackers import finite, require, run_id
from megaflow.types import ConfigError


def scalars(run_dir: Path, tag: str) -> list[tuple[int, float]]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(run_dir / "tensorboard"))
    events.Reload()
    return [(event.step, round(event.value, 6)) for event in events.Scalars(tag)]


def test_tensorboard_over_a_resume(tmp_path: Path) -> None:
    make = TRACKERS.get("tensorboard")
    first = make(Config(), tmp_path)
    for step in (1, 2, 3):
        first.log(step, {"reward/mean": step / 8, "train/loss": float("nan")})
    first.close()
    resumed = make(Config(), tmp_path, resume_step=2)
    resumed.log(3, {"reward/mean": 0.75})
    resumed.close()
    assert scalars(tmp_path, "reward/mean") == [(1, 0.125), (2, 0.25), (3, 0.75)]  # the abandoned step 3 is purged
    with pytest.raises(KeyError):
        scalars(tmp_path, "train/loss")


Points = list[tuple[int, float]]


def read_wandb(path: Path, key: str) -> tuple[Points, dict[str, Any]]:
    """History and configuration of a .wandb file: records of wandb's own protobuf in LevelDB's log format.

    Seven bytes of header, then blocks of 32 KiB with records of CRC (4 bytes), length (2), kind (1: whole, 2 to 4: first, middle, last).
    """
    from wandb.proto.wandb_internal_pb2 import Record

    data, at, whole = path.read_bytes(), 7, b""
    points: Points = []
    settings: dict[str, Any] = {}
    while at + 7 <= len(data):
        if (left := 32768 - at % 32768) < 7:
            at += left
            continue
        size, kind = int.from_bytes(data[at + 4 : at + 6], "little"), data[at + 6]
        whole, at = whole + data[at + 7 : at + 7 + size], at + 7 + size
        if kind in (1, 4):
            record, whole = Record.FromString(whole), b""
            found = {item.key or ".".join(item.nested_key): json.loads(item.value_json) for item in record.history.item}
            points += [(record.history.step.num, found[key])] if key in found else []
            settings |= {item.key: json.loads(item.value_json) for item in record.run.config.update}
    return points, settings


def read_swanlab(path: Path, key: str) -> Points:
    from swanlab.proto.swanlab.record.v1.record_pb2 import Record
    from swanlab.sdk.internal.core_python.store import DataStoreReader

    reader = DataStoreReader()
    reader.open(path)
    scalars = [record.scalar for record in map(Record.FromString, reader) if record.HasField("scalar")]
    reader.close()
    return [(scalar.step, scalar.value.number) for scalar in scalars if scalar.key == key]


def log_killed_and_resumed(name: str, run_dir: Path) -> None:
    """Steps 1 to 3, killed after the checkpoint of step 2, and 3 and 4 in the resumed run."""
    make = TRACKERS.get(name)
    for resume_step, values in ((0, {1: 0.125, 2: 0.25, 3: 0.375}), (2, {3: 0.75, 4: 1.0})):
        tracker = make(Config(), run_dir, resume_step)
        for step, value in values.items():
            tracker.log(step, {"reward/mean": value, "train/loss": float("nan")})
        tracker.close()


@pytest.fixture
def offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No key, nothing of the user's, and nothing left there."""
    for name in ("WANDB_API_KEY", "WANDB_MODE", "SWANLAB_API_KEY", "SWANLAB_MODE"):
        monkeypatch.delenv(name, raising=False)
    for name, value in {"HOME": tmp_path / "home", "TRACKIO_DIR": tmp_path / "trackio", "WANDB_SILENT": "true"}.items():
        monkeypatch.setenv(name, str(value))
    (tmp_path / "home").mkdir()


def test_wandb_offline_over_a_resume(tmp_path: Path, offline: None) -> None:
    pytest.importorskip("wandb")
    log_killed_and_resumed("wandb", tmp_path)
    first, second = sorted((tmp_path / "wandb").glob("offline-run-*/*.wandb"))
    assert first.name == second.name  # one run: its id
    points, settings = read_wandb(first, "reward/mean")
    assert points == [(1, 0.125), (2, 0.25), (3, 0.375)] and settings["actor"]["lr"] == 1e-6
    assert read_wandb(second, "reward/mean")[0] == [(3, 0.75), (4, 1.0)] and not read_wandb(first, "train/loss")[0]


def test_trackio_over_a_resume(tmp_path: Path, offline: None) -> None:
    pytest.importorskip("trackio")
    log_killed_and_resumed("trackio", tmp_path)
    from trackio.sqlite_storage import SQLiteStorage

    assert SQLiteStorage.get_runs("megaflow") == ["run"]
    rows = SQLiteStorage.get_logs("megaflow", "run")
    assert [(row["step"], row["reward/mean"]) for row in rows] == [(1, 0.125), (2, 0.25), (3, 0.375), (3, 0.75), (4, 1.0)]
    assert not [row for row in rows if "train/loss" in row] and (tmp_path / "trackio/megaflow.db").exists()


def test_swanlab_offline_over_a_resume(tmp_path: Path, offline: None) -> None:
    pytest.importorskip("swanlab")
    log_killed_and_resumed("swanlab", tmp_path)
    first, second = sorted((tmp_path / "swanlab").glob("run-*/*.swanlab"))
    assert first.name == second.name
    assert read_swanlab(first, "reward/mean") == [(1, 0.125), (2, 0.25), (3, 0.375)] and not read_swanlab(first, "train/loss")
    assert read_swanlab(second, "reward/mean") == [(3, 0.75), (4, 1.0)]


@pytest.mark.parametrize("name", ["wandb", "trackio", "swanlab"])
def test_missing_package_names_the_command(name: str, tmp_path: Path) -> None:
    if importlib.util.find_spec(name):
        pytest.skip(f"{name} is installed")
    with pytest.raises(ConfigError, match=f"pip install {name}"):
        TRACKERS.get(name)(Config(), tmp_path)


def test_require_names_what_is_missing() -> None:
    with pytest.raises(ConfigError, match=r"monitor.trackers: no_such_tracker cannot be imported .*; pip install no_such_tracker"):
        require("no_such_tracker")


def test_unknown_tracker() -> None:
    with pytest.raises(ConfigError, match="did you mean 'tensorboard'"):
        TRACKERS.get("tensorbord")


def test_run_id_survives_a_resume_and_not_a_new_start(tmp_path: Path) -> None:
    made = run_id(tmp_path, "wandb", is_new=True)
    assert run_id(tmp_path, "wandb", is_new=False) == made
    assert run_id(tmp_path, "wandb", is_new=True) != made


def test_finite() -> None:
    assert finite({"a": 1, "b": float("inf"), "c": float("nan")}) == {"a": 1.0}
