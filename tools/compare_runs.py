"""Two or more runs side by side in the terminal: what differs in their configurations, where they ended, and their curves as sparklines.

    python tools/compare_runs.py runs/quickstart runs/other
    python tools/compare_runs.py runs/a runs/b runs/c --metrics reward/mean train/entropy
"""

from __future__ import annotations

import argparse
import difflib
import os
import sys
from pathlib import Path
from typing import Any

from megaflow.config.nodes import flow
from megaflow.monitor.console import duration
from megaflow.monitor.recorded import Recorded, config_difference, mean_of_last, read_run
from megaflow.monitor.svg import number, thinned
from megaflow.types import ConfigError, UserError

BARS = "▁▂▃▄▅▆▇█"
SPARK_WIDTH = 24
NAME_WIDTH = 30
LONGEST_VALUE = 40  # characters of a configuration's value
METRICS = (
    "reward/mean", "rollout/len_mean", "rollout/truncated", "train/kl", "train/ref_kl", "train/entropy", "train/grad_norm", "train/nll",
    "dpo/margin", "mismatch/logp_abs_diff", "perf/tokens_per_s", "mem/peak_gb",
)  # fmt: skip


def sparkline(values: list[float], low: float, high: float, width: int = SPARK_WIDTH) -> str:
    """A bar a value, of at most `width` bins, between the lowest and highest of all runs, so that lines can be compared."""
    shown = [y for _, y in thinned(list(enumerate(values)), width)]
    scale = (len(BARS) - 1) / (high - low) if high > low else 0.0
    return "".join(BARS[round((value - low) * scale)] for value in shown)


def configurations(runs: list[Recorded]) -> list[str]:
    """Of the runs that have one; the others are named."""
    known = [run for run in runs if run.config]
    lacking = [f"configuration: no config.yaml that can be read in {run.path}" for run in runs if not run.config]
    if len(known) < 2:
        return [*lacking, "configuration: nothing to compare"]
    different = config_difference(known)
    if not different:
        return [*lacking, "configuration: the same" if not lacking else "configuration: the same in the others"]
    rows = [[key, *[_value(value) for value in values]] for key, values in different.items()]
    return [*lacking, "configuration, where it differs:", *_table(rows, ["", *[run.name for run in known]])]


def _value(value: Any) -> str:
    text = flow(value)
    return text if len(text) <= LONGEST_VALUE else text[: LONGEST_VALUE - 3] + "..."


def endings(runs: list[Recorded]) -> list[str]:
    rows = []
    for label, of in ENDINGS:
        rows.append([label, *[of(run) for run in runs]])
    for name in dict.fromkeys(name for run in runs for name in run.names("eval/") if name.endswith("/accuracy")):
        rows.append([name, *[_first_to_last(run.points(name)) for run in runs]])
    return ["where they ended:", *_table(rows, ["", *[run.name for run in runs]])]


def _first_to_last(points: list[tuple[float, float]]) -> str:
    return f"{points[0][1]:.3f} -> {points[-1][1]:.3f}" if points else "-"


def _reward(run: Recorded) -> str:
    found = mean_of_last(run.points("reward/mean"))
    return "-" if found is None else f"{found:.3f}"


ENDINGS = (
    ("state", lambda run: f"{run.status.get('state', 'unknown')}, step {run.metrics[-1]['step']}"),
    ("reward, last 5 steps", _reward),
    ("time in steps", lambda run: duration(sum(value for _, value in run.points("time/step")))),
)


def chosen_metrics(runs: list[Recorded], asked: list[str] | None) -> list[str]:
    """What to draw: those asked for, else the usual ones that some run has. Raises ConfigError for one that no run has logged."""
    if asked is None:
        return [metric for metric in METRICS if any(run.points(metric) for run in runs)]
    logged = sorted({name for run in runs for name in run.names("") if "/" in name})
    for metric in asked:
        if metric not in logged:
            near = difflib.get_close_matches(metric, logged, n=3, cutoff=0.5)
            hint = f"did you mean {' or '.join(near)}?" if near else f"there are {', '.join(logged)}"
            raise ConfigError(f"--metrics {metric}: no such metric in these runs; {hint}")
    return asked


def curves(runs: list[Recorded], metrics: list[str]) -> list[str]:
    """For each metric a line a run: first value, sparkline, last value; a dash where a run has no finite value of it."""
    lines = ["curves (one scale for all runs of a metric):"]
    for metric in metrics:
        found = [(run, [value for _, value in run.points(metric)]) for run in runs]
        everything = [value for _, values in found for value in values]
        lines.append(f"  {metric}")
        for run, values in found:
            shown = sparkline(values, min(everything), max(everything)) if values else "-"
            ends = f"{number(values[0]):>8} {shown:<{SPARK_WIDTH}} {number(values[-1])}" if values else f"{'-':>8}"
            lines.append(f"    {run.name[:NAME_WIDTH]:<{min(NAME_WIDTH, max(len(r.name) for r in runs))}} {ends}")
    return lines


def _table(rows: list[list[str]], head: list[str]) -> list[str]:
    widths = [max(len(row[i]) for row in [head, *rows]) for i in range(len(head))]
    return ["  " + "  ".join(f"{cell:<{width}}" for cell, width in zip(row, widths, strict=True)).rstrip() for row in [head, *rows]]


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", type=Path, nargs="+", help="run directories")
    parser.add_argument("--metrics", nargs="+", help="what to draw; default: the usual ones that the runs have")
    args = parser.parse_args(argv)
    try:
        if len(args.runs) < 2:
            raise ConfigError("give at least two run directories")
        runs = [read_run(path) for path in args.runs]
        metrics = chosen_metrics(runs, args.metrics)
    except UserError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    print("\n\n".join("\n".join(part) for part in (endings(runs), curves(runs, metrics), configurations(runs))))
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except BrokenPipeError:  # piped into head
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        sys.exit(0)
