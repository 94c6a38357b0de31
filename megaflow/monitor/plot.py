"""curve.png: the learning curve of a run, drawn from its metrics.jsonl."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from megaflow.monitor.metrics import read_metrics

# title, metric; a panel whose metric was not logged is left out
PANELS = (
    ("response length (tokens)", "rollout/len_mean"),
    ("truncated responses (part)", "rollout/truncated"),
    ("KL: how far a step moves the policy", "train/kl"),
    ("KL to the reference model", "train/ref_kl"),
    ("entropy (nats)", "train/entropy"),
    ("gradient norm, before clipping", "train/grad_norm"),
    ("clipped tokens (part)", "train/clip_frac"),
    ("|logp| engine - trainer", "mismatch/logp_abs_diff"),
    ("seconds a step", "time/step"),
)
COLUMNS = 4
COLORS = ("#2166ac", "#b2182b", "#1b7837", "#762a83")


def draw_curve(metrics_path: Path, picture: Path, title: str) -> bool:
    """Reward and held-out accuracy large, the rest small below. Returns False when there is nothing to draw yet."""
    lines = [line for line in read_metrics(metrics_path) if line["step"] >= 0]
    if not any(line.get("reward/mean") is not None for line in lines):
        return False
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure  # not pyplot: no global state, no display

    panels = [(name, metric) for name, metric in PANELS if any(line.get(metric) is not None for line in lines)]
    rows = -(-len(panels) // COLUMNS)
    figure = Figure(figsize=(12, 4.2 + 2.1 * rows), layout="constrained")
    FigureCanvasAgg(figure)
    grid = figure.add_gridspec(1 + rows, COLUMNS, height_ratios=[2.0] + [1.0] * rows)
    _reward_panel(figure.add_subplot(grid[0, :]), lines, title)
    for index, (name, metric) in enumerate(panels):
        axis = figure.add_subplot(grid[1 + index // COLUMNS, index % COLUMNS])
        axis.plot(*_points(lines, metric), color=COLORS[0], linewidth=1.2)
        axis.set_title(name, fontsize=9)
        _finish(axis)
    figure.savefig(picture, dpi=130)
    return True


def _reward_panel(axis: Any, lines: list[dict[str, Any]], title: str) -> None:
    steps, rewards = _points(lines, "reward/mean")
    axis.plot(steps, rewards, color=COLORS[0], alpha=0.35, linewidth=1, label="mean reward of a step")
    axis.plot(steps, _smooth(rewards), color=COLORS[0], linewidth=2.2, label="mean of 5 steps")
    names = sorted({name for line in lines for name in line if name.startswith("eval/") and name.endswith("/accuracy")})
    for color, name in zip(COLORS[1:], names, strict=False):
        steps, values = _points(lines, name)
        label = f"accuracy on {name.split('/')[1]}"
        axis.plot(steps, values, color=color, marker="o", markersize=7, linestyle="--", linewidth=1.2, label=label)
        for step, value in ((steps[0], values[0]), (steps[-1], values[-1])):
            axis.annotate(f"{value:.0%}", (step, value), textcoords="offset points", xytext=(0, 9), ha="center", fontsize=9, color=color)
    axis.set_title(title, fontsize=12)
    axis.set_xlabel("step", fontsize=9)
    axis.margins(y=0.14)
    _finish(axis)
    axis.legend(fontsize=9, frameon=False, loc="best")


def _points(lines: list[dict[str, Any]], name: str) -> tuple[list[int], list[float]]:
    """Steps and values of one metric; a missing or non-finite value is a gap."""
    found = [(line["step"], line[name]) for line in lines if line.get(name) is not None]
    return [step for step, _ in found], [value for _, value in found]


def _smooth(values: list[float], window: int = 5) -> list[float]:
    """Mean of the last `window` values (of fewer at the start)."""
    return [sum(values[max(0, i - window + 1) : i + 1]) / min(i + 1, window) for i in range(len(values))]


def _finish(axis: Any) -> None:
    axis.grid(alpha=0.25, linewidth=0.6)
    axis.tick_params(labelsize=8)
    axis.yaxis.get_offset_text().set_fontsize(7)
    axis.spines[["top", "right"]].set_visible(False)
