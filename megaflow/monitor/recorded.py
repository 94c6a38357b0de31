"""A run directory as it was left (or is, while the run goes on), for the tools that look at it. Loads no torch."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megaflow.monitor.intact import json_lines, json_object, read_lines, told, yaml_object
from megaflow.monitor.metrics import read_metrics
from megaflow.types import ConfigError

log = logging.getLogger(__name__)

NUMBER = int | float
SAMPLE = {  # what the tools need of a sample, and of which kind
    "group": int, "index": int, "id": str, "prompt": str, "answer": object, "response": str, "reward": NUMBER, "parts": dict,
    "advantage": NUMBER, "response_tokens": int, "finish": str,
}  # fmt: skip


@dataclass(frozen=True)
class Recorded:
    """metrics: the whole lines of metrics.jsonl; config: dotted key -> value; status, env: as in their files.

    The last three are empty if their file is missing or damaged.
    """

    path: Path
    metrics: list[dict[str, Any]]
    config: dict[str, Any]
    status: dict[str, Any]
    env: dict[str, Any]

    @property
    def name(self) -> str:
        return self.path.resolve().name

    def points(self, metric: str) -> list[tuple[float, float]]:
        """(step, value) where the metric was logged and finite."""
        return [(line["step"], line[metric]) for line in self.metrics if line.get(metric) is not None]

    def names(self, prefix: str) -> list[str]:
        """Metrics that begin with `prefix`, in order of their first appearance."""
        return list(dict.fromkeys(name for line in self.metrics for name in line if name.startswith(prefix)))

    def sample_steps(self) -> list[int]:
        return sample_steps(self.path)

    def samples(self, step: int) -> list[dict[str, Any]]:
        return read_samples(self.path / f"samples/step_{step}.jsonl")


def sample_files(run_dir: Path) -> tuple[dict[int, Path], list[Path]]:
    """samples/step_N.jsonl by step, in order; and files beside them that are called like them and have no step."""
    paths = sorted((run_dir / "samples").glob("step_*.jsonl"))
    steps = {int(found[1]): path for path in paths if (found := re.fullmatch(r"step_(0|[1-9][0-9]*)\.jsonl", path.name))}
    return dict(sorted(steps.items())), [path for path in paths if path not in steps.values()]


def sample_steps(run_dir: Path) -> list[int]:
    """Steps whose samples were recorded. Warns of files that have no step."""
    steps, stray = sample_files(run_dir)
    if stray:
        log.warning("%s: left out, for a step's file is called step_N.jsonl", ", ".join(map(str, stray)))
    return list(steps)


def read_samples(path: Path) -> list[dict[str, Any]]:
    """The samples of one file; damaged lines are left out, with a warning. Raises ConfigError when the file cannot be read."""
    samples, damaged = json_lines(read_lines(path), _sample_fault)
    if damaged:
        log.warning(told(path, damaged))
    return samples


def _sample_fault(sample: dict[str, Any]) -> str:
    for name, kind in SAMPLE.items():
        if name not in sample:
            return f"no {name}"
        if not isinstance(sample[name], kind):
            return f"its {name} is {sample[name]!r:.60}"
    return next((f"{name} of its parts is {value!r:.60}" for name, value in sample["parts"].items() if not isinstance(value, NUMBER)), "")


def read_run(path: Path) -> Recorded:
    """Raises ConfigError when it is no run directory. What is damaged in it is left out, with a warning."""
    try:
        metrics = read_metrics(path / "metrics.jsonl")
    except OSError as error:
        raise ConfigError(f"{path / 'metrics.jsonl'} cannot be read: {error.strerror}") from error
    if not metrics:
        raise ConfigError(f"{path} has no metrics.jsonl with a whole line: is it a run directory (runs/<name>), and has it made a step?")
    config = _object_or_nothing(path / "config.yaml", yaml_object)
    status, env = (_object_or_nothing(path / name, json_object) for name in ("status.json", "env.json"))
    return Recorded(path, metrics, flat(config) if config else {}, status, env)


def _object_or_nothing(path: Path, read: Callable[[Path], dict[str, Any]]) -> dict[str, Any]:
    """A run can be looked at without these files."""
    try:
        return read(path) if path.exists() else {}
    except ConfigError as error:
        log.warning("%s; left out", error)
        return {}


def flat(tree: Any, prefix: str = "") -> dict[str, Any]:
    """{"a": {"b": 1}} -> {"a.b": 1}; lists are values."""
    if not isinstance(tree, dict) or not tree:
        return {prefix: tree}
    return {k: v for name, value in tree.items() for k, v in flat(value, f"{prefix}.{name}" if prefix else str(name)).items()}


def config_difference(runs: list[Recorded], leave_out: tuple[str, ...] = ("run.name", "run.root", "run.resume")) -> dict[str, list[Any]]:
    """Keys whose value is not the same in all runs -> the values, by run. Keys that a run has not are another version's: left out."""
    keys = sorted(set.intersection(*[set(run.config) for run in runs]) - set(leave_out))
    rows = {key: [run.config.get(key) for run in runs] for key in keys}
    return {key: values for key, values in rows.items() if any(value != values[0] for value in values)}


def mean_of_last(points: list[tuple[float, float]], count: int = 5) -> float | None:
    """Of the last `count` values; None without any."""
    last = [value for _, value in points[-count:]]
    return sum(last) / len(last) if last else None
