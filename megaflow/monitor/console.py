"""What the first rank prints: a banner at the start, one line a step."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from pathlib import Path

# phase -> its short name in the line
SHORT = {"rollout": "roll", "reward": "rew", "logprob": "logp", "update": "upd"}
PHASES = {name: SHORT.get(name, name) for name in ("sync", "rollout", "reward", "logprob", "logic", "update", "save", "eval")}
# column, metric, format; a metric that is not there leaves its column out
COLUMNS = (
    ("reward", "reward/mean", ".3f"),
    ("nll", "train/nll", ".3f"),
    ("margin", "dpo/margin", ".3f"),
    ("pairs right", "dpo/accuracy", ".0%"),
    ("len", "rollout/len_mean", ".1f"),
    ("trunc", "rollout/truncated", ".0%"),
    ("kl", "train/kl", ".1e"),
    ("ref_kl", "train/ref_kl", ".1e"),
    ("clip", "train/clip_frac", ".1%"),
    ("gnorm", "train/grad_norm", ".2g"),
)


def banner(name: str, directory: Path, resume_step: int, steps: int, facts: Mapping[str, str]) -> str:
    """What runs, where, from which step, on what."""
    start = f"goes on after step {resume_step}" if resume_step else "starts"
    head = f"megaflow: run {name} {start}, to step {steps}; everything it writes is in {directory}/"
    return "\n".join([head, *(f"  {key}: {value}" for key, value in facts.items())])


class Console:
    """Makes the line of a step, about 160 columns wide. `steps`: the run's last step."""

    def __init__(self, steps: int):
        self.steps = steps
        self._recent: deque[float] = deque(maxlen=20)  # seconds of the last steps: the pace changes as responses grow

    def line(self, step: int, metrics: Mapping[str, float]) -> str:
        """All on one line, so that a run of many steps can be read as a table; phases are seconds."""
        if "time/step" in metrics:
            self._recent.append(metrics["time/step"])
        width = len(str(self.steps))
        left = [f"step {step:>{width}}/{self.steps}"]
        left += [f"{label} {_number(metrics[name], form)}" for label, name, form in COLUMNS if name in metrics]
        left += [f"{name.split('/')[1]} {metrics[name]:.3f}" for name in metrics if name.startswith("eval/") and name.endswith("/accuracy")]
        return " | ".join(filter(None, [" ".join(left), self._times(metrics), self._machine(step, metrics)]))

    def _times(self, metrics: Mapping[str, float]) -> str:
        """`sync 0.1 roll 2.0 ... = 4.4s`; phases under 50 ms are left out."""
        parts = [f"{short} {metrics[f'time/{phase}']:.1f}" for phase, short in PHASES.items() if metrics.get(f"time/{phase}", 0) >= 0.05]
        total = [f"= {metrics['time/step']:.1f}s"] if "time/step" in metrics else []
        return " ".join(parts + total)

    def _machine(self, step: int, metrics: Mapping[str, float]) -> str:
        parts = []
        if "perf/tokens_per_s" in metrics:
            parts.append(f"{metrics['perf/tokens_per_s']:,.0f} tok/s")
        if "mem/peak_gb" in metrics:
            parts.append(f"{metrics['mem/peak_gb']:.1f} GB")
        if self._recent and step:
            parts.append(f"eta {duration((self.steps - step) * sum(self._recent) / len(self._recent))}")
        return " ".join(parts)


def _number(value: float, form: str) -> str:
    return format(value, form) if value == value and abs(value) != float("inf") else str(value)


def duration(seconds: float) -> str:
    """47s, 12m05s, 3h07m, 2d04h."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole}s"
    if whole < 3600:
        return f"{whole // 60}m{whole % 60:02}s"
    if whole < 86400:
        return f"{whole // 3600}h{whole % 3600 // 60:02}m"
    return f"{whole // 86400}d{whole % 86400 // 3600:02}h"
