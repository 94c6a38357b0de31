"""The run directory: who holds it, whether it is used, and where a run begins. Rank 0 only; nothing here is collective.

    config.yaml  env.json  status.json  metrics.jsonl  curve.png  samples/step_N.jsonl  checkpoints/  logs/rank_N.log  STOP (by the user)
    when a guard has turned the run back: quarantine/step_N/  metrics_rolled_back.jsonl  rolled_back.json
    when metrics.jsonl had lines that could not be read: metrics_damaged.jsonl
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import yaml

from megaflow.config.loading import load
from megaflow.config.printing import as_yaml
from megaflow.config.schema import Config
from megaflow.monitor.intact import yaml_object
from megaflow.monitor.metrics import metrics_lines, replace_text
from megaflow.monitor.recorded import flat, sample_files
from megaflow.trainer.relaunch import is_restart
from megaflow.trainer.status import previous_status
from megaflow.types import ConfigError

# (step, path) of the newest good checkpoint in a checkpoints directory, or of the checkpoint that the path itself is; None: there is none
FindCheckpoint = Callable[[Path], tuple[int, Path] | None]

# Changing these in the middle of a run would make its saved state mean something else: another model's weights, another data's cursor.
FIXED_KEYS = ("run.seed", "model.path", "data.")
FREE_KEYS = ("data.eval",)  # the held-out sets are only measured (data.eval_fraction does change the training set)


@dataclass(frozen=True)
class Start:
    """Where a run begins: after `step` (0: anew), from `checkpoint`; `notices` are for the user."""

    step: int
    checkpoint: Path | None
    notices: tuple[str, ...] = ()


def claim(directory: Path) -> IO[str]:
    """Hold the directory as long as this process lives; close the returned file to let go.

    A POSIX record lock: the kernel drops it when the process dies, however it dies, and child processes do not inherit it, so that an
    orphaned worker of a killed run keeps nobody out. Raises ConfigError when a live process holds the directory.
    """
    directory.mkdir(parents=True, exist_ok=True)
    lock = (directory / ".lock").open("a+")
    try:
        fcntl.lockf(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        lock.seek(0)
        holder = lock.read().strip() or "another process"
        lock.close()
        raise ConfigError(
            f"{directory} is in use: {holder} is running there; wait for it, stop it (touch {directory}/STOP), or choose another run.name"
        ) from error
    lock.truncate(0)
    lock.write(f"pid {os.getpid()} on {os.uname().nodename}")
    lock.flush()
    return lock


def decide(cfg: Config, directory: Path, find: FindCheckpoint) -> Start:
    """Apply run.resume to what the directory holds. Raises ConfigError that lists the ways out.

    A run that its launcher starts again goes on from its own last checkpoint, whatever run.resume said at its beginning.
    """
    status = previous_status(directory / "status.json")
    newest = find(directory / "checkpoints") if (directory / "checkpoints").exists() else None
    lines, damaged = metrics_lines(directory / "metrics.jsonl")  # Metrics keeps the damaged ones aside and says so
    is_used = bool(lines or damaged)
    again = is_restart(status)
    if cfg.run.resume not in ("auto", "never") and not (again and newest):
        return _from_path(cfg, directory, newest, is_used and not again, find)
    if not is_used and newest is None:
        return Start(0, None)
    if cfg.run.resume == "never" and not again:
        raise used(directory, newest)
    if status and status["state"] == "done" and (newest is None or status["step"] >= cfg.run.steps):
        raise finished(directory, status["step"], newest)
    if newest is None:
        last = f"at step {lines[-1]['step']}" if lines else "at a step that cannot be read from its metrics.jsonl"
        ended = f"{directory} holds a run that ended {last}, before its first checkpoint"
        return Start(0, None, (f"{ended}: starting over from step 0",))
    step, path = newest
    if step > cfg.run.steps:
        raise finished(directory, step, newest)
    changed = changed_keys(directory / "config.yaml", cfg)
    refuse_fixed(changed, directory)
    notices = [f"resuming from {path} (step {step})"]
    notices += [f"changed since: {key}: {old} -> {new}" for key, (old, new) in changed.items()]
    return Start(step, path, tuple(notices))


def _from_path(cfg: Config, directory: Path, newest: tuple[int, Path] | None, is_used: bool, find: FindCheckpoint) -> Start:
    """run.resume=PATH: any run's checkpoint in an unused directory; in a used one only its own newest."""
    path = Path(cfg.run.resume)
    if not path.exists():
        raise ConfigError(f"run.resume={path}: no such directory (looked in {Path.cwd()}); it must be auto, never or a checkpoint's path")
    inside = path / "checkpoints"
    found = find(inside if inside.is_dir() else path)  # a run directory will do
    if found is None:
        raise ConfigError(f"run.resume={path}: there is no complete checkpoint there")
    if found[0] > cfg.run.steps:
        raise ConfigError(f"run.resume={path} is at step {found[0]}, past run.steps={cfg.run.steps}; raise run.steps")
    if not is_used and newest is None:
        return Start(*found, notices=(f"a new run from {found[1]} (step {found[0]})",))
    if not found[1].resolve().is_relative_to((directory / "checkpoints").resolve()):
        raise used(directory, newest)
    if newest and newest[0] > found[0]:
        raise ConfigError(
            f"run.resume={path} is at step {found[0]}, but {directory} has a newer checkpoint, of step {newest[0]}, that a later "
            f"run.resume=auto would take. Delete it first (rm -r {newest[1]}), or branch off with another run.name"
        )
    refuse_fixed(changed_keys(directory / "config.yaml", cfg), directory)
    return Start(*found, notices=(f"resuming from {found[1]} (step {found[0]})",))


def used(directory: Path, newest: tuple[int, Path] | None) -> ConfigError:
    go_on = f"go on from its checkpoint of step {newest[0]}" if newest else "start it over (it has no checkpoint)"
    return ConfigError(
        f"{directory} is already used by a run. Ways out:\n"
        f"  run.resume=auto        {go_on}\n"
        f"  run.name=<other>       write to another directory\n"
        f"  rm -r {directory}      delete what is there"
    )


def finished(directory: Path, step: int, newest: tuple[int, Path] | None) -> ConfigError:
    saved = f"go on from its checkpoint of step {newest[0]}" if newest else "not possible here: it kept no checkpoint"
    return ConfigError(
        f"the run in {directory} is finished: it made all its {step} steps. Ways out:\n"
        f"  run.steps=<more than {step}>  {saved}\n"
        f"  run.name=<other>       write to another directory\n"
        f"  rm -r {directory}      delete what is there"
    )


def changed_keys(path: Path, cfg: Config) -> dict[str, tuple[Any, Any]]:
    """Keys whose value differs between the directory's config.yaml and the present configuration: key -> (old, new).

    A file of an earlier version may lack keys, which had their defaults. Raises ConfigError when it is damaged.
    """
    if not path.exists():
        return {}
    try:
        old = _with_defaults(path, yaml_object(path))
    except ConfigError as error:
        ways = "Mend it, or delete it to go on without asking whether model, data and seed are those that the run was saved with"
        raise ConfigError(f"{error}. {ways}") from error
    new = _flat(cfg)
    pairs = {key: (old.get(key), new.get(key)) for key in sorted(old | new) if key != "run.resume"}
    return {key: (before, after) for key, (before, after) in pairs.items() if before != after}


def _with_defaults(path: Path, raw: dict[str, Any]) -> dict[str, Any]:
    try:
        return _flat(load(str(path), []).config)
    except ConfigError:  # it has keys that are no more
        return _flat(Config()) | flat(raw)


def _flat(cfg: Config) -> dict[str, Any]:
    return flat(yaml.safe_load(as_yaml(cfg)))


def refuse_fixed(changed: dict[str, tuple[Any, Any]], directory: Path) -> None:
    """Raises ConfigError when a changed key would give the saved state another meaning."""
    fixed = {key: pair for key, pair in changed.items() if key.startswith(FIXED_KEYS) and key not in FREE_KEYS}
    if fixed:
        rows = "\n".join(f"  {key}: {old} -> {new}" for key, (old, new) in fixed.items())
        raise ConfigError(
            f"{directory} cannot be resumed with another model, seed or data than it was saved with:\n{rows}\n"
            f"Set them back (see {directory}/config.yaml), or begin a new run: run.name=<other>"
        )


def drop_samples(directory: Path, step: int) -> None:
    """Delete the samples of steps after `step`."""
    for number, path in sample_files(directory)[0].items():
        if number > step:
            path.unlink()


def prepare(cfg: Config, directory: Path, start: Start) -> None:
    """Make the directory's inside; drop what the abandoned steps left (their metrics are dropped by Metrics)."""
    for name in ("samples", "checkpoints", "logs"):
        (directory / name).mkdir(exist_ok=True)
    drop_samples(directory, start.step)
    replace_text(directory / "config.yaml", as_yaml(cfg))
