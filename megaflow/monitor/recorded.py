"""A run directory as it was left (or is, while the run goes on), for the tools that look at it. Loads no torch."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from megaflow.monitor.metrics import read_metrics
from megaflow.types import ConfigError


@dataclass(frozen=True)
class Recorded:
    """metrics: the lines of metrics.jsonl; config: dotted key -> value; status, env: as in their files, empty if there is none."""

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
        return sorted(int(p.stem.removeprefix("step_")) for p in (self.path / "samples").glob("step_*.jsonl"))

    def samples(self, step: int) -> list[dict[str, Any]]:
        return [json.loads(line) for line in (self.path / f"samples/step_{step}.jsonl").read_text().splitlines()]


def read_run(path: Path) -> Recorded:
    """Raises ConfigError when it is no run directory."""
    metrics = read_metrics(path / "metrics.jsonl")
    if not metrics:
        raise ConfigError(f"{path} has no metrics.jsonl with a whole line: is it a run directory (runs/<name>), and has it made a step?")
    file = path / "config.yaml"
    config = flat(yaml.safe_load(file.read_text())) if file.exists() else {}
    return Recorded(path, metrics, config, _json(path / "status.json"), _json(path / "env.json"))


def _json(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text()) if path.exists() else {}


def flat(tree: Any, prefix: str = "") -> dict[str, Any]:
    """{"a": {"b": 1}} -> {"a.b": 1}; lists are values."""
    if not isinstance(tree, dict) or not tree:
        return {prefix: tree}
    return {k: v for name, value in tree.items() for k, v in flat(value, f"{prefix}.{name}" if prefix else name).items()}


def config_difference(runs: list[Recorded], leave_out: tuple[str, ...] = ("run.name", "run.root", "run.resume")) -> dict[str, list[Any]]:
    """Keys whose value is not the same in all runs -> the values, by run. Keys that a run has not are another version's: left out."""
    keys = sorted(set.intersection(*[set(run.config) for run in runs]) - set(leave_out))
    rows = {key: [run.config.get(key) for run in runs] for key in keys}
    return {key: values for key, values in rows.items() if any(value != values[0] for value in values)}


def mean_of_last(points: list[tuple[float, float]], count: int = 5) -> float | None:
    """Of the last `count` values; None without any."""
    last = [value for _, value in points[-count:]]
    return sum(last) / len(last) if last else None
