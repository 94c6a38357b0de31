"""What a used run directory means for each run.resume, and what each refusal offers instead."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from megaflow.config.printing import as_yaml
from megaflow.config.schema import Config
from megaflow.monitor.recorded import flat
from megaflow.trainer.rundir import changed_keys, claim, decide, prepare
from megaflow.types import ConfigError


def find(path: Path) -> tuple[int, Path] | None:
    """A stand-in for the checkpoint package: step_N folders that contain `complete`."""
    places = [path] if path.name.startswith("step_") else path.glob("step_*")
    good = [(int(p.name.removeprefix("step_")), p) for p in places if (p / "complete").exists()]
    return max(good, default=None)


def config(tmp_path: Path, **run: Any) -> Config:
    cfg = Config()
    return dataclasses.replace(cfg, run=dataclasses.replace(cfg.run, root=str(tmp_path), name="r", **{"steps": 10} | run))


def used_directory(tmp_path: Path, last_step: int, checkpoints: tuple[int, ...] = (), state: str = "running") -> Path:
    directory = tmp_path / "r"
    directory.mkdir()
    (directory / "metrics.jsonl").write_text("".join(json.dumps({"step": s}) + "\n" for s in range(1, last_step + 1)))
    (directory / "status.json").write_text(json.dumps({"state": state, "step": last_step}))
    (directory / "config.yaml").write_text(as_yaml(config(tmp_path)))
    for step in checkpoints:
        (directory / f"checkpoints/step_{step}").mkdir(parents=True)
        (directory / f"checkpoints/step_{step}/complete").touch()
    return directory


def test_unused(tmp_path: Path) -> None:
    for resume in ("auto", "never"):
        assert decide(config(tmp_path, resume=resume), tmp_path / "r", find).step == 0


def test_a_start_that_failed_before_its_first_step_leaves_the_directory_unused(tmp_path: Path) -> None:
    directory = used_directory(tmp_path, 0, state="preflight")
    assert decide(config(tmp_path, resume="never"), directory, find).step == 0


def test_auto_goes_on_from_the_newest_good_checkpoint(tmp_path: Path) -> None:
    directory = used_directory(tmp_path, 7, (2, 4, 6))
    (directory / "checkpoints/step_6/complete").unlink()  # the kill came while it was saved
    start = decide(config(tmp_path), directory, find)
    assert (start.step, start.checkpoint) == (4, directory / "checkpoints/step_4")
    assert start.notices == (f"resuming from {directory}/checkpoints/step_4 (step 4)",)


def test_auto_without_any_checkpoint_starts_over_and_says_so(tmp_path: Path) -> None:
    start = decide(config(tmp_path), used_directory(tmp_path, 3), find)
    assert (start.step, start.checkpoint) == (0, None) and "starting over from step 0" in start.notices[0]


def test_never_lists_the_ways_out(tmp_path: Path) -> None:
    directory = used_directory(tmp_path, 7, (4,))
    with pytest.raises(ConfigError) as error:
        decide(config(tmp_path, resume="never"), directory, find)
    for way in ("run.resume=auto", "checkpoint of step 4", "run.name=", f"rm -r {directory}"):
        assert way in str(error.value)


def test_finished(tmp_path: Path) -> None:
    directory = used_directory(tmp_path, 10, (10,), state="done")
    with pytest.raises(ConfigError, match=r"finished: it made all its 10 steps") as error:
        decide(config(tmp_path), directory, find)
    assert "run.steps=<more than 10>  go on from its checkpoint of step 10" in str(error.value)
    assert decide(config(tmp_path, steps=20), directory, find).step == 10


def test_finished_without_a_checkpoint_is_not_thrown_away(tmp_path: Path) -> None:
    directory = used_directory(tmp_path, 10, state="done")
    with pytest.raises(ConfigError, match="kept no checkpoint"):
        decide(config(tmp_path, steps=20), directory, find)


def test_killed_between_the_last_save_and_the_end(tmp_path: Path) -> None:
    """Nothing is left to train, but the run may still write how it ended."""
    assert decide(config(tmp_path), used_directory(tmp_path, 10, (10,)), find).step == 10


def test_fewer_steps_than_already_made(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="run.steps=<more than 8>"):
        decide(config(tmp_path, steps=5), used_directory(tmp_path, 8, (8,)), find)


def test_path_of_another_run_begins_a_new_one(tmp_path: Path) -> None:
    other = used_directory(tmp_path, 4, (4,)).rename(tmp_path / "other")
    for path in (other / "checkpoints/step_4", other / "checkpoints", other):
        start = decide(config(tmp_path, resume=str(path)), tmp_path / "r", find)
        assert (start.step, start.checkpoint) == (4, other / "checkpoints/step_4")
    used_directory(tmp_path, 2)
    with pytest.raises(ConfigError, match="already used"):
        decide(config(tmp_path, resume=str(other)), tmp_path / "r", find)


def test_path_of_an_older_checkpoint_of_its_own(tmp_path: Path) -> None:
    directory = used_directory(tmp_path, 9, (4, 8))
    with pytest.raises(ConfigError, match=rf"newer checkpoint, of step 8, .*rm -r {directory}/checkpoints/step_8"):
        decide(config(tmp_path, resume=f"{directory}/checkpoints/step_4"), directory, find)
    (directory / "checkpoints/step_8/complete").unlink()
    assert decide(config(tmp_path, resume=f"{directory}/checkpoints/step_4"), directory, find).step == 4


def test_bad_paths(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"run.resume=no/such: no such directory .* must be auto, never or a checkpoint's path"):
        decide(config(tmp_path, resume="no/such"), tmp_path / "r", find)
    (tmp_path / "step_3").mkdir()
    with pytest.raises(ConfigError, match="no complete checkpoint"):
        decide(config(tmp_path, resume=str(tmp_path / "step_3")), tmp_path / "r", find)
    (tmp_path / "step_30").mkdir()
    (tmp_path / "step_30/complete").touch()
    with pytest.raises(ConfigError, match="at step 30, past run.steps=10"):
        decide(config(tmp_path, resume=str(tmp_path / "step_30")), tmp_path / "r", find)


def test_changed_settings_are_shown(tmp_path: Path) -> None:
    directory = used_directory(tmp_path, 5, (5,))
    cfg = config(tmp_path, steps=20)
    cfg = dataclasses.replace(cfg, actor=dataclasses.replace(cfg.actor, lr=3e-6))
    assert decide(cfg, directory, find).notices[1:] == ("changed since: actor.lr: 1e-06 -> 3e-06", "changed since: run.steps: 10 -> 20")


@pytest.mark.parametrize(
    ("section", "change", "key"),
    [
        ("run", {"seed": 1}, "run.seed: 0 -> 1"),
        ("model", {"path": "models/b"}, "model.path:  -> models/b"),
        ("data", {"shuffle": False}, "data.shuffle: True -> False"),
        ("data", {"eval_fraction": 0.1}, "data.eval_fraction: 0.0 -> 0.1"),
    ],
)
def test_settings_that_give_the_state_another_meaning(tmp_path: Path, section: str, change: dict[str, Any], key: str) -> None:
    directory = used_directory(tmp_path, 5, (5,))
    cfg = config(tmp_path)
    cfg = dataclasses.replace(cfg, **{section: dataclasses.replace(getattr(cfg, section), **change)})
    with pytest.raises(ConfigError, match="another model, seed or data") as error:
        decide(cfg, directory, find)
    assert key in str(error.value) and "run.name=<other>" in str(error.value)


def test_held_out_sets_may_change(tmp_path: Path) -> None:
    from megaflow.config.schema import SourceConfig

    directory = used_directory(tmp_path, 5, (5,))
    cfg = config(tmp_path)
    cfg = dataclasses.replace(cfg, data=dataclasses.replace(cfg.data, eval=[SourceConfig(path="a.jsonl")]))
    assert decide(cfg, directory, find).step == 5
    assert list(changed_keys(directory / "config.yaml", cfg)) == ["data.eval"]


def test_a_run_of_an_earlier_version_goes_on(tmp_path: Path) -> None:
    """Its file lacks keys that came later, also of a list's items, and has one that is no more."""
    from megaflow.config.schema import SourceConfig

    directory = used_directory(tmp_path, 5, (5,))
    cfg = config(tmp_path)
    cfg = dataclasses.replace(cfg, data=dataclasses.replace(cfg.data, train=[SourceConfig(path="a.jsonl")]))
    file = directory / "config.yaml"
    raw = yaml.safe_load(as_yaml(cfg))
    del raw["data"]["curriculum"], raw["data"]["train"][0]["limit"], raw["watchdog"]
    file.write_text(yaml.safe_dump(raw))
    assert changed_keys(file, cfg) == {} and decide(cfg, directory, find).step == 5
    file.write_text(yaml.safe_dump(raw | {"data": raw["data"] | {"shuffle": False}}))
    assert changed_keys(file, cfg) == {"data.shuffle": (False, True)}
    del raw["data"]["train"]
    cfg = config(tmp_path)
    file.write_text(yaml.safe_dump(raw | {"actor": raw["actor"] | {"no_more": 1}}))
    assert changed_keys(file, cfg) == {"actor.no_more": (1, None)}


def test_flatten() -> None:
    assert flat({"a": {"b": 1, "c": [1, {"d": 2}]}, "e": {}}) == {"a.b": 1, "a.c": [1, {"d": 2}], "e": {}}


def test_prepare_drops_samples_of_abandoned_steps(tmp_path: Path) -> None:
    from megaflow.trainer.rundir import Start

    directory = used_directory(tmp_path, 12, (9,))
    (directory / "samples").mkdir()
    for step in (1, 9, 10, 12):
        (directory / f"samples/step_{step}.jsonl").touch()
    prepare(config(tmp_path), directory, Start(9, None))
    assert sorted(p.name for p in (directory / "samples").iterdir()) == ["step_1.jsonl", "step_9.jsonl"]


HOLD = """
import pathlib, sys, time
from megaflow.trainer.rundir import claim
lock = claim(pathlib.Path(sys.argv[1]))
print("held", flush=True)
time.sleep(60)
"""


def test_a_live_process_holds_the_directory_and_a_killed_one_does_not(tmp_path: Path) -> None:
    holder = subprocess.Popen([sys.executable, "-c", HOLD, str(tmp_path / "r")], stdout=subprocess.PIPE, text=True)
    try:
        assert holder.stdout is not None and holder.stdout.readline() == "held\n"
        with pytest.raises(ConfigError, match=rf"in use: pid {holder.pid} on .*touch {tmp_path}/r/STOP"):
            claim(tmp_path / "r")
    finally:
        holder.kill()
        holder.wait()
    claim(tmp_path / "r").close()


def test_damaged_lines_of_metrics_make_a_directory_used(tmp_path: Path) -> None:
    directory = used_directory(tmp_path, 0)
    (directory / "metrics.jsonl").write_bytes(b"\0\0\n")
    with pytest.raises(ConfigError, match="already used"):
        decide(config(tmp_path, resume="never"), directory, find)
    assert "a step that cannot be read from its metrics.jsonl, before its first" in decide(config(tmp_path), directory, find).notices[0]


@pytest.mark.parametrize("content", ["", '{"state": "do', "[]", "{}", '{"state": "done"}'])
def test_a_damaged_status_is_no_reason_to_begin_anew(tmp_path: Path, content: str) -> None:
    """It may have said that the run is done."""
    directory = used_directory(tmp_path, 7, (4,))
    (directory / "status.json").write_text(content)
    with pytest.raises(ConfigError, match=r"status.json is damaged: .*Delete it, and the run goes on from its last checkpoint"):
        decide(config(tmp_path), directory, find)
    (directory / "status.json").unlink()
    assert decide(config(tmp_path), directory, find).step == 4


def test_a_damaged_configuration_cannot_say_whether_the_run_is_the_same(tmp_path: Path) -> None:
    directory = used_directory(tmp_path, 7, (4,))
    (directory / "config.yaml").write_text("run: {name: [\n")
    with pytest.raises(ConfigError, match=r"config.yaml is damaged: .*Mend it, or delete it"):
        decide(config(tmp_path), directory, find)
    (directory / "config.yaml").unlink()
    assert decide(config(tmp_path), directory, find).step == 4


def test_samples_of_abandoned_steps_are_deleted_and_files_that_are_none_stay(tmp_path: Path) -> None:
    directory = used_directory(tmp_path, 7, (4,))
    (directory / "samples").mkdir()
    for name in ("step_4", "step_5", "step_10", "step_x", "eval_sums"):
        (directory / f"samples/{name}.jsonl").touch()
    prepare(config(tmp_path), directory, decide(config(tmp_path), directory, find))
    assert sorted(p.stem for p in (directory / "samples").iterdir()) == ["eval_sums", "step_4", "step_x"]
