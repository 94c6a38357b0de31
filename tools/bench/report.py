"""The table of docs/benchmarks.md from the files that the benchmarks' --json made.

    python tools/bench/report.py rollout.json step.json update.json ...
    python tools/bench/report.py bench/*.json --write docs/benchmarks.md

A figure that no file has is "not measured". With --write the table takes the place of what stands between the two marks in the page, but
for figures of a benchmark and a model that no file is of: those stay as they are.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

MISSING = "not measured"
BEGIN, END = "<!-- table: begin -->", "<!-- table: end -->"
Found = dict[str, Any]  # one file


@dataclass(frozen=True)
class Row:
    """One figure. `value` gives it from a file, None if the file has no such; `reach`: what it should be, with `is_reached` to tell."""

    name: str
    how: str
    tool: str
    value: Callable[[Found], float | None]
    form: str
    reach: str = "reported"
    is_reached: Callable[[float], bool] | None = None


def key(name: str, **needs: Any) -> Callable[[Found], float | None]:
    """Figure `name` of files in which `needs` hold."""
    return lambda found: found.get(name) if all(found.get(k) == v for k, v in needs.items()) else None


def sync_row(what: str, column: str, ranks: int | None = None, least_gb: float = 0.0) -> Callable[[Found], float | None]:
    """Of a file of tools/bench/sync.py."""

    def value(found: Found) -> float | None:
        if (ranks is not None and found.get("ranks") != ranks) or found.get("bytes", 0) < least_gb * 1e9:
            return None
        return next((row.get(column) for row in found.get("rows", []) if row["what"] == what), None)

    return value


def at_least(bound: float) -> Callable[[float], bool]:
    return lambda value: value >= bound


def at_most(bound: float) -> Callable[[float], bool]:
    return lambda value: value <= bound


SGLANG, COPY, BROADCAST = "times SGLang, flattened buckets", "times device copy", "times broadcast"
ROWS = [
    Row("rollout", "tokens/s of generate against the same engine's own call", "rollout", key("ours_over_bare"), ".3f", ">= 0.97",
        at_least(0.97)),
    Row("rollout, tokens/s", "256 prompts of 128, 512 new tokens, with log-probabilities", "rollout", key("ours_tokens_per_s"), ",.0f"),
    Row("sync", "time of SGLang's flattened buckets over ours, without the proof", "sync",
        lambda f: inverse(sync_row("pull, proof off", SGLANG, 1)(f)), ".1f", ">= 4", at_least(4)),
    Row("sync, GB/s", "without the proof", "sync", sync_row("pull, proof off", "gb_per_s", 1), ",.0f", ">= 450", at_least(450)),
    Row("sync with the proof", "time over that without", "sync", lambda f: ratio(f, "pull, proof on", "pull, proof off", 1), ".2f", "<= 2",
        at_most(2)),
    Row("sync, 2 GPUs", "time over that of one broadcast of the same bytes", "sync", sync_row("pull, proof off", BROADCAST, 2), ".2f",
        "<= 1.5", at_most(1.5)),
    Row("sleep and wake of the engine", "milliseconds together, 60 GB of KV cache", "sleep", key("sleep_and_wake_ms", kv_gb=60.0), ".1f",
        "<= 60", at_most(60)),
    Row("sleep and wake at once", "the same with nothing between them, so that freed memory is still being cleared", "sleep",
        key("at_once_ms", kv_gb=60.0), ".1f"),
    Row("offload, to host", "of the pinned copy's speed, actor.offload=all", "offload", key("all_sleep_of_pinned"), ".0%", ">= 85%",
        at_least(0.85)),
    Row("offload, to device", "of the pinned copy's speed, actor.offload=all", "offload", key("all_wake_of_pinned"), ".0%", ">= 85%",
        at_least(0.85)),
    Row("update", "MFU of forward, backward and optimizer step", "update", key("update_mfu"), ".3f", ">= 0.45", at_least(0.45)),
    Row("log-probabilities", "MFU of the forward pass", "update", key("logprobs_mfu"), ".3f", ">= 0.45", at_least(0.45)),
    Row("experts, update", "tokens/s in one product over one after another", "experts", key("grouped_over_sequential_update"), ".2f"),
    Row("experts, log-probabilities", "the same, forward only", "experts", key("grouped_over_sequential_logprobs"), ".2f"),
    Row("packing", "tokens/s packed over padded, long-tailed lengths", "packing", key("packed_over_padded"), ".2f", ">= 2", at_least(2)),
    Row("step overhead", "step less its phases at their stand-alone speed, of the step", "step", key("overhead_of_step"), ".1%", "<= 5%",
        at_most(0.05)),
    Row("memory", "MB by which the device holds more after sleep in the last step than in step 3", "step", key("memory_growth_mb"), ".0f",
        "<= 64", at_most(64)),
    Row("mismatch", "mean absolute difference of the log-probabilities, same weights", "mismatch", key("engine_trainer_abs"), ".4f"),
    Row("mismatch over independent rounding", "root mean squares; near 1: 16-bit rounding explains it", "mismatch",
        key("rms_over_independent"), ".2f"),
    Row("mismatch, routes replayed", "the same, the trainer's tokens sent to the experts that the engine chose", "mismatch",
        key("engine_replayed_abs"), ".4f"),
    Row("2 GPUs", "samples/s, dp=2 over one GPU, the same work for each", "step", key("scaling", gpus=2), ".2f", ">= 1.9", at_least(1.9)),
    Row("start-up", "seconds from launch to the first token, compiled kernels kept", "startup", key("second_to_first_token"), ".1f", "< 45",
        lambda value: value < 45),
    Row("start-up, first time", "the same with what was there, with --cold nothing", "startup", key("first_to_first_token"), ".1f"),
]  # fmt: skip


def inverse(value: float | None) -> float | None:
    return 1 / value if value else None


def ratio(found: Found, above: str, below: str, ranks: int) -> float | None:
    a, b = (sync_row(what, "ms", ranks)(found) for what in (above, below))
    return a / b if a is not None and b is not None else None


def tool_of(found: Found) -> str:
    """Which benchmark wrote the file; those of the actor and the sync do not name themselves."""
    marks = {"rows": "sync", "update_mfu": "update", "packed_over_padded": "packing", "all_sleep_of_pinned": "offload",
             "grouped_over_sequential_update": "experts"}  # fmt: skip
    return found.get("tool") or next((tool for mark, tool in marks.items() if mark in found), "")


def model_of(found: Found) -> str:
    return found.get("model") or Path(found.get("folder", "")).name


def table(files: list[Found], old: dict[str, list[str]] | None = None) -> str:
    """One line a figure and file; a model in brackets where files tell it. old: lines of figures, by name, to be kept."""
    lines = ["| figure | how | value | reach | | device |", "|---|---|---|---|---|---|"]
    for row in ROWS:
        values = [(row.value(f), f) for f in files if tool_of(f) == row.tool]
        is_there = [each for each in values if each[0] is not None]
        before = (old or {}).get(row.name, [])
        lines += before
        for value, found in is_there or ([] if before else [(None, {})]):
            lines.append("| " + " | ".join(cells(row, value, found)) + " |")
    return "\n".join(lines)


def cells(row: Row, value: float | None, found: Found) -> list[str]:
    how = f"{row.how} (`{row.tool}`)"
    if value is None:
        return [row.name, how, MISSING, row.reach, "", ""]
    verdict = "" if row.is_reached is None else "reached" if row.is_reached(value) else "**missed**"
    model = model_of(found)
    return [row.name, how, format(value, row.form) + (f" ({model})" if model else ""), row.reach, verdict, found.get("device", "")]


def versions(files: list[Found]) -> str:
    """Commands and versions that the files name."""
    lines = []
    for found in files:
        if "command" in found:
            named = ", ".join(f"{name} {version}" for name, version in found.get("versions", {}).items())
            lines.append(f"- {found['device']}, {named}: `{found['command']}`")
    return "\n".join(lines)


def kept(page: str, files: list[Found]) -> tuple[dict[str, list[str]], list[str]]:
    """Of the table in `page`, what the files do not make anew: rows of a benchmark and model that no file is of, by the figure's name; and
    the lines of commands with a script and a folder that no file's has."""
    made = {(tool_of(found), model_of(found)) for found in files}
    rows: dict[str, list[str]] = {}
    old = page.partition(BEGIN)[2].partition(END)[0].splitlines()
    for line in old:
        named = [cell.strip() for cell in line.split("|")[1:4]] if line.startswith("| ") else ["", "", ""]
        model = named[2].partition("(")[2].removesuffix(")")
        if any(row.name == named[0] and (row.tool, model) not in made for row in ROWS) and named[2] != MISSING:
            rows.setdefault(named[0], []).append(line)
    commands = [subject(found.get("command", "")) for found in files]
    return rows, [line for line in old if line.startswith("- ") and subject(line.rpartition(": `")[2].rstrip("`")) not in commands]


def subject(command: str) -> list[str]:
    """Script and folder."""
    return command.split()[1:3]


def replaced(page: str, files: list[Found]) -> str:
    """`page` with the files' figures between the marks. Raises ValueError without both marks."""
    before, begin, rest = page.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"the page has no {BEGIN} ... {END}")
    rows, commands = kept(page, files)
    text = "\n\n".join(filter(None, [table(files, rows), "\n".join([*commands, *filter(None, [versions(files)])])]))
    return f"{before}{BEGIN}\n{text}\n{END}{after}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="*", type=Path, help="what the benchmarks' --json wrote")
    parser.add_argument("--write", type=Path, help="page whose table is replaced")
    options = parser.parse_args()
    files = [json.loads(path.read_text()) for path in options.files]
    text = "\n\n".join(filter(None, [table(files), versions(files)]))
    print(text)
    if options.write:
        options.write.write_text(replaced(options.write.read_text(), files))
    return 0


if __name__ == "__main__":
    sys.exit(main())
