"""torchrun --max-restarts: the second start of the same launcher goes on by itself; a new launcher's does what run.resume says."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from megaflow.trainer.relaunch import launcher
from megaflow.trainer.rundir import decide
from megaflow.types import ConfigError, DivergedError, UserError
from tests.unit.test_run_directory import config, find, used_directory


@pytest.fixture
def restarted(monkeypatch):
    """As torchrun has it for a rank that it starts for the second time."""
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")


def note(directory: Path, **fields) -> None:
    path = directory / "status.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"message": "", "launcher": launcher()} | fields))


@pytest.mark.parametrize("resume", ["auto", "never"])
def test_it_goes_on_from_its_last_checkpoint_whatever_it_was_told_at_its_beginning(restarted, tmp_path: Path, resume: str) -> None:
    directory = used_directory(tmp_path, 5, (2, 4), "crashed")
    note(directory)
    assert decide(config(tmp_path, resume=resume), directory, find).step == 4


def test_a_branch_of_another_run_goes_on_from_its_own_checkpoint_or_begins_again_from_the_others(restarted, tmp_path: Path) -> None:
    other = tmp_path / "other" / "step_3"
    other.mkdir(parents=True)
    (other / "complete").touch()
    directory = used_directory(tmp_path, 5, (), "running")
    note(directory)
    cfg = config(tmp_path, resume=str(other))
    assert decide(cfg, directory, find).checkpoint == other
    (directory / "checkpoints/step_5").mkdir(parents=True)
    (directory / "checkpoints/step_5/complete").touch()
    assert decide(cfg, directory, find).checkpoint == directory / "checkpoints/step_5"


@pytest.mark.parametrize(("state", "code", "kind"), [("stopped", 75, UserError), ("diverged", 4, DivergedError), ("done", 0, UserError)])
def test_what_has_ended_stays_ended_with_its_own_code(restarted, tmp_path: Path, state: str, code: int, kind: type) -> None:
    directory = used_directory(tmp_path, 5, (4,), state)
    note(directory, exit_code=code, message="found STOP")
    with pytest.raises(kind, match="not started again: found STOP") as error:
        decide(config(tmp_path), directory, find)
    assert error.value.exit_code == code


def test_the_directory_of_another_launch_is_used(restarted, tmp_path: Path) -> None:
    directory = used_directory(tmp_path, 5, (4,), "crashed")
    note(directory, launcher="another host 1 2.00")
    with pytest.raises(ConfigError, match="already used"):
        decide(config(tmp_path, resume="never"), directory, find)


def test_a_first_start_is_no_restart(monkeypatch, tmp_path: Path) -> None:
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "job7")
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "0")
    assert launcher() == "job7"
    directory = used_directory(tmp_path, 5, (4,), "stopped")
    note(directory, exit_code=75)
    assert decide(config(tmp_path), directory, find).step == 4, "stopped, and started again by a person"
