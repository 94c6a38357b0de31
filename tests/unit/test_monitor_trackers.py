"""TensorBoard gets what was logged; a tracker whose package is missing says how to install it."""

from __future__ import annotations

import importlib.util
from pathlib import Path

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
