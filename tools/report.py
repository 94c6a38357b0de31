"""A run as one HTML file that needs nothing else: curves, phases, memory, lengths, mismatch, samples, configuration.

    python tools/report.py runs/quickstart
    python tools/report.py runs/quickstart runs/other --out report.html

With a second run its curves are drawn dashed beside the first's, and the configurations are compared; compare_runs.py takes more than two.
It has no script and asks the network for nothing, so it can be mailed.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
from collections.abc import Iterator
from html import escape
from pathlib import Path
from typing import Any

from megaflow.monitor.console import PHASES, duration
from megaflow.monitor.metrics import describe, replace_text
from megaflow.monitor.plot import PANELS
from megaflow.monitor.recorded import Recorded, config_difference, mean_of_last, read_run
from megaflow.monitor.svg import COLORS, Series, line_chart, number, stacked_bars
from megaflow.types import ConfigError, UserError

MOST_SAMPLE_STEPS = 25  # steps whose samples are shown
MOST_CHARACTERS = 4000  # of a shown prompt or response
STYLE = """
:root { color-scheme: light dark; --line: #8884; --soft: #8882; }
body { font: 15px/1.45 system-ui, sans-serif; max-width: 900px; margin: 2em auto; padding: 0 1em; }
h1 { font-size: 1.5em; margin-bottom: 0; } h2 { font-size: 1.15em; margin-top: 2em; border-bottom: 1px solid var(--line); }
table { border-collapse: collapse; font-size: 0.92em; } td, th { padding: 0.15em 0.9em 0.15em 0; text-align: left; vertical-align: top; }
.charts { display: flex; flex-wrap: wrap; gap: 14px; } svg { max-width: 100%; height: auto; }
.wide { overflow-x: auto; } .wide svg { min-width: 640px; } /* on a telephone they scroll: shrunk to it they could not be read */
svg text { fill: currentColor; font: 11px system-ui, sans-serif; } svg .title { font-size: 12px; font-weight: 600; }
svg .small { font-size: 10px; } svg .small tspan { font-size: 10px; } svg .grid { stroke: var(--line); stroke-width: 0.7; }
svg .tip { fill: transparent; } svg .tip:hover { fill: var(--soft); }
pre { white-space: pre-wrap; overflow-wrap: anywhere; background: var(--soft); padding: 0.5em; margin: 0.3em 0; font-size: 0.88em; }
.good { border-left: 3px solid #3a8f5c; } .bad { border-left: 3px solid #c8553d; } .soft { opacity: 0.7; } code { font-size: 0.92em; }
"""


def page(run: Recorded, other: Recorded | None) -> str:
    parts = [header(run, other), summary(run, other), learning(run, other), phases(run), memory(run), lengths(run, other)]
    parts += [mismatch(run, other), samples(run), configuration(run, other), metric_table(run)]
    title = escape(f"megaflow: {run.name}")
    head = f'<head><meta charset="utf-8"><meta name="viewport" content="width=device-width"><title>{title}</title>'
    return f"<!doctype html><html lang='en'>{head}<style>{STYLE}</style></head><body>{''.join(parts)}</body></html>\n"


def section(title: str, *parts: str) -> str:
    body = "".join(parts)
    return f"<h2>{escape(title)}</h2>{body}" if body else ""


def wide(chart: str) -> str:
    return f"<div class='wide'>{chart}</div>" if chart else ""


def table(rows: list[list[str]], head: list[str] | None = None) -> str:
    top = f"<tr>{''.join(f'<th>{escape(h)}</th>' for h in head)}</tr>" if head else ""
    return f"<table>{top}{''.join('<tr>' + ''.join(f'<td>{cell}</td>' for cell in row) + '</tr>' for row in rows)}</table>"


def header(run: Recorded, other: Recorded | None) -> str:
    status, env = run.status, run.env
    said = [f"{status.get('state', 'unknown')}, step {status.get('step', run.metrics[-1]['step'])} of {run.config.get('run.steps', '?')}"]
    said += [f"model {run.config.get('model.path', '?')}", f"{env.get('ranks', '?')} rank(s) on {env.get('hostname', '?')}"]
    said += [f"started {env['started']}"] if "started" in env else []
    message = f"<p class='bad'><b>{escape(str(status['message']))}</b></p>" if status.get("message") else ""
    beside = f"<p>Dashed, for comparison: <b>{escape(other.name)}</b></p>" if other else ""
    return f"<h1>{escape(run.name)}</h1><p class='soft'>{escape(' · '.join(said))}</p>{message}{beside}"


def summary(run: Recorded, other: Recorded | None) -> str:
    runs = [run, other] if other else [run]
    rows = [[escape(label), *[escape(text(each)) for each in runs]] for label, text in SUMMARY]
    for name in run.names("eval/"):
        rows.append([escape(name), *[_first_to_last(each.points(name)) for each in runs]])
    return table(rows, ["", *[each.name for each in runs]])


def _first_to_last(points: list[tuple[float, float]]) -> str:
    if not points:
        return "-"
    return f"{points[0][1]:.4g}" + (f" → {points[-1][1]:.4g} (step {points[-1][0]:g})" if len(points) > 1 else "")


def _reward(run: Recorded) -> str:
    points = run.points("reward/mean")
    first, last = mean_of_last(points[:5]), mean_of_last(points)
    return "-" if first is None or last is None else f"{first:.3f} → {last:.3f}"


def _median(run: Recorded, metric: str) -> str:
    values = sorted(value for _, value in run.points(metric))
    return number(values[len(values) // 2]) if values else "-"


SUMMARY = (
    ("reward, first 5 steps → last 5", _reward),
    ("time in steps", lambda run: duration(sum(value for _, value in run.points("time/step")))),
    ("tokens/s, median", lambda run: _median(run, "perf/tokens_per_s")),
    ("peak memory, GB", lambda run: number(max((v for _, v in run.points("mem/peak_gb")), default=0.0))),
    ("optimizer steps skipped", lambda run: number(sum(v for _, v in run.points("train/skipped")))),
)


MEMORY = {
    "actor_gb": "most that the trainer held in a phase, GB",
    "engine_gb": "most that the engine held in a phase, GB",
    "device_gb": "in use on the device at a phase's end, GB",
}


# --- charts -----------------------------------------------------------------------------------------------------------------------


def curves(run: Recorded, other: Recorded | None, *metrics: str) -> list[Series]:
    """The metrics of both runs, a color each; a single metric is in the title already, so its curves are called by their runs."""
    found = []
    for color, metric in zip(itertools.cycle(COLORS), metrics, strict=False):
        is_single = other is not None and len(metrics) == 1
        found.append(Series(run.name if is_single else metric, run.points(metric), color, dots=metric.startswith("eval/")))
        if other:
            label = other.name if is_single else f"{metric} ({other.name})"
            found.append(Series(label, other.points(metric), COLORS[1] if is_single else color, dashed=True))
    return found


def learning(run: Recorded, other: Recorded | None) -> str:
    accuracies = [name for name in run.names("eval/") if name.endswith("/accuracy")]
    large = wide(line_chart("reward and held-out accuracy", curves(run, other, "reward/mean", *accuracies), 860, 260))
    own = {metric for _, metric in PANELS} - {"rollout/len_mean", "rollout/truncated", "mismatch/logp_abs_diff"}
    small = [line_chart(title, curves(run, other, metric)) for title, metric in PANELS if metric in own]
    extra = [line_chart(name, curves(run, other, name)) for name in ("train/loss", "train/lr", "train/nll", "dpo/margin", "dpo/accuracy")]
    return section("Learning", large, f"<div class='charts'>{''.join(small + extra)}</div>")


def phases(run: Recorded) -> str:
    """Seconds of a step, phase on phase; what no phase covers is "other"."""
    lines = [line for line in run.metrics if line["step"] > 0 and line.get("time/step") is not None]
    names = [phase for phase in PHASES if any(f"time/{phase}" in line for line in lines)]
    layers = {name: [line.get(f"time/{name}") or 0.0 for line in lines] for name in names}
    covered = [sum(values[i] for values in layers.values()) for i in range(len(lines))]
    layers["other"] = [max(0.0, line["time/step"] - covered[i]) for i, line in enumerate(lines)]
    return section("Time", wide(stacked_bars("seconds of a step, by phase", [line["step"] for line in lines], layers)))


def memory(run: Recorded) -> str:
    """The step's peak, then for each side a curve a phase."""
    charts = [line_chart("rank 0, GB", curves(run, None, *(name for name in run.names("mem/") if name.count("/") == 1)), 860)]
    for kind, title in MEMORY.items():
        found = {name.split("/")[1]: run.points(name) for name in run.names("mem/") if name.endswith(f"/{kind}")}
        series = [Series(phase, points, color) for color, (phase, points) in zip(itertools.cycle(COLORS), found.items(), strict=False)]
        charts.append(line_chart(title, series, 860))
    return section("Memory", *map(wide, charts))


def lengths(run: Recorded, other: Recorded | None) -> str:
    long = line_chart("response length, tokens", curves(run, other, "rollout/len_mean", "rollout/len_max"))
    cut = line_chart("part of the responses cut short", curves(run, other, "rollout/truncated"))
    return section("Response lengths", f"<div class='charts'>{long}{cut}</div>" if long or cut else "")


def mismatch(run: Recorded, other: Recorded | None) -> str:
    charts = "".join(line_chart(name, curves(run, other, name)) for name in run.names("mismatch/"))
    return section("Trainer against engine", f"<div class='charts'>{charts}</div>" if charts else "")


# --- text -------------------------------------------------------------------------------------------------------------------------


def samples(run: Recorded) -> str:
    """For steps spread over the run, the group with the widest rewards: its best and its worst sample."""
    steps = run.sample_steps()
    spread = [steps[round(i * (len(steps) - 1) / (MOST_SAMPLE_STEPS - 1))] for i in range(MOST_SAMPLE_STEPS)] if steps else []
    shown = sorted(set(spread if len(steps) > MOST_SAMPLE_STEPS else steps))
    return section("Samples: best and worst of a prompt", *[_step_samples(step, run.samples(step), step == shown[-1]) for step in shown])


def _step_samples(step: int, lines: list[dict[str, Any]], is_open: bool) -> str:
    groups: dict[int, list[dict[str, Any]]] = {}
    for line in lines:
        groups.setdefault(line["group"], []).append(line)
    if not groups:
        return ""
    ranked = [sorted(group, key=lambda s: -s["reward"]) for group in groups.values()]
    widest = max(ranked, key=lambda group: group[0]["reward"] - group[-1]["reward"])
    mean = sum(line["reward"] for line in lines) / len(lines)
    ends = widest if len(widest) == 1 else [widest[0], widest[-1]]
    body = "".join(_sample(s, "good" if s is ends[0] else "bad") for s in ends)
    answer = _text(json.dumps(widest[0]["answer"], ensure_ascii=False))
    asked = f"<pre>{_text(widest[0]['prompt'])}</pre><p class='soft'>answer: {answer}</p>"
    head = f"<summary>step {step}: mean reward {mean:.3f} of {len(lines)} recorded</summary>"
    return f"<details{' open' if is_open else ''}>{head}{asked}{body}</details>"


def _sample(s: dict[str, Any], kind: str) -> str:
    what = f"reward {s['reward']:g}, advantage {s['advantage']:+.3f}, {s['response_tokens']} tokens, {s['finish']}"
    return f"<pre class='{kind}'>{_text(s['response'])}</pre><p class='soft'>{escape(what)}</p>"


def _text(text: str) -> str:
    """Control characters are shown, not obeyed; what is too long is cut."""
    shown = "".join(c if c.isprintable() or c in "\n\t" else repr(c)[1:-1] for c in text[:MOST_CHARACTERS])
    return escape(shown) + (f" [{len(text) - MOST_CHARACTERS} more characters]" if len(text) > MOST_CHARACTERS else "")


def configuration(run: Recorded, other: Recorded | None) -> str:
    parts = []
    lacking = [each.name for each in (run, other) if each and not each.config]
    if lacking:
        parts.append(f"<p>No config.yaml that can be read: {escape(', '.join(lacking))}.</p>")
    elif other:
        different = config_difference([run, other])
        rows = [[f"<code>{escape(k)}</code>", *[escape(json.dumps(v)) for v in values]] for k, values in different.items()]
        parts.append(table(rows, ["differs", run.name, other.name]) if rows else "<p>Both runs have the same configuration.</p>")
    every = [[f"<code>{escape(key)}</code>", escape(json.dumps(value, default=str))] for key, value in run.config.items()]
    return section("Configuration", *parts, f"<details><summary>all {len(every)} keys</summary>{table(every)}</details>" if every else "")


def metric_table(run: Recorded) -> str:
    last = run.metrics[-1]
    rows = [[f"<code>{escape(n)}</code>", number(v), escape(describe(n) or "")] for n, v in _numbers(last)]
    inner = table(rows, ["", f"step {last['step']}", ""])
    return section("Metrics", f"<details><summary>all of the last step, and what they mean</summary>{inner}</details>")


def _numbers(line: dict[str, Any]) -> Iterator[tuple[str, float]]:
    return ((name, value) for name, value in sorted(line.items()) if "/" in name and isinstance(value, float | int))


def write(out: Path, text: str) -> None:
    """Raises ConfigError when the page cannot be written there."""
    if out.is_dir():
        raise ConfigError(f"{out} is a directory: name a file in it, e.g. --out {out / 'report.html'}")
    try:
        replace_text(out, text)
    except OSError as error:
        way = "make that directory first" if not out.parent.exists() else "make room or get the right to write there"
        raise ConfigError(f"{out} cannot be written: {error.strerror}; {way}, or give another place with --out") from error


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path, help="a run directory, e.g. runs/quickstart; the run may still be going on")
    parser.add_argument("other", type=Path, nargs="?", help="another run to compare it with; one at most: compare_runs.py takes more")
    parser.add_argument("--out", type=Path, help="default: report.html in the run directory")
    args = parser.parse_args(argv)
    try:
        text = page(read_run(args.run), read_run(args.other) if args.other else None)
        out = args.out or args.run / "report.html"
        write(out, text)
    except UserError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    print(f"written: {out} ({len(text) / 1e6:.2f} MB)")
    return 0


if __name__ == "__main__":
    sys.exit(main())
