"""Look at what the policy wrote: samples/step_N.jsonl of a run and samples/eval_<set>.jsonl of launch/evaluate.py, as text.

    python tools/view_samples.py runs/quickstart                      the last step, group by group
    python tools/view_samples.py runs/quickstart --step 3 --group 0   one prompt's samples
    python tools/view_samples.py runs/quickstart --best 3 --worst 3   by reward
    python tools/view_samples.py runs/quickstart --eval addition      what launch/evaluate.py generated for an eval set
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from megaflow.monitor.recorded import read_samples, sample_steps
from megaflow.types import ConfigError, UserError

GREEN, RED, DIM, BOLD = "32", "31", "2", "1"
Paint = Callable[[str, str], str]


def step_file(run_dir: Path, step: int | None) -> tuple[str, Path]:
    """("step N", its file); the last step recorded if `step` is None. Raises ConfigError with the steps there are."""
    steps = sample_steps(run_dir)
    if not steps:
        sets = eval_sets(run_dir)
        asked = f"is {run_dir} a run directory, and has it made a step?"
        there = f"it has samples of eval sets: --eval {' or '.join(sets)}" if sets else asked
        raise ConfigError(f"{run_dir}/samples has no step_N.jsonl: {there}")
    step = steps[-1] if step is None else step
    if step not in steps:
        raise ConfigError(f"{run_dir}/samples has no step {step}; it has {steps[0]} to {steps[-1]} ({len(steps)} steps)")
    return f"step {step}", run_dir / f"samples/step_{step}.jsonl"


def eval_file(run_dir: Path, name: str) -> tuple[str, Path]:
    """("eval set <name>", its file). Raises ConfigError with the sets there are."""
    sets = eval_sets(run_dir)
    if name not in sets:
        there = f"it has {', '.join(sets)}" if sets else "launch/evaluate.py writes it"
        raise ConfigError(f"{run_dir}/samples has no eval_{name}.jsonl; {there}")
    return f"eval set {name}", run_dir / f"samples/eval_{name}.jsonl"


def eval_sets(run_dir: Path) -> list[str]:
    return sorted(path.stem.removeprefix("eval_") for path in (run_dir / "samples").glob("eval_*.jsonl"))


def choose(samples: list[dict[str, Any]], group: int | None, best: int, worst: int) -> list[dict[str, Any]]:
    """The samples of one group, and of those the best and the worst by reward; with neither asked for, all in order."""
    inside = [s for s in samples if group is None or s["group"] == group]
    if not best and not worst:
        return inside
    ranked = sorted(inside, key=lambda s: -s["reward"])
    top = ranked[:best]
    return top + [s for s in ranked[len(ranked) - worst :] if s not in top]


def lines_of(samples: list[dict[str, Any]], paint: Paint, width: int) -> Iterator[str]:
    """A prompt once for the samples that follow each other under it."""
    previous = None
    for sample in samples:
        if sample["group"] != previous:
            yield ""
            yield paint(BOLD, f"group {sample['group']}  {sample['id']}  answer: {json.dumps(sample['answer'], ensure_ascii=False)}")
            yield block(sample["prompt"], "  > ", width)
        previous = sample["group"]
        yield paint(GREEN if sample["advantage"] > 0 else RED if sample["advantage"] < 0 else DIM, "  " + heading(sample))
        yield block(sample["response"], "      ", width)


def heading(sample: dict[str, Any]) -> str:
    parts = " ".join(f"{name}={value:g}" for name, value in sample["parts"].items())
    end = "truncated" if sample["finish"] == "length" else sample["finish"]
    advantage = f"advantage {sample['advantage']:+.3f}"
    return f"[{sample['index']}] reward {sample['reward']:g} ({parts})  {advantage}  {sample['response_tokens']} tokens, {end}"


def block(text: str, indent: str, width: int) -> str:
    """Wrapped and indented; line breaks of the text stay. Control characters are shown, not obeyed."""
    shown = "".join(c if c.isprintable() or c == "\n" else repr(c)[1:-1] for c in text)
    wrapped = [row for line in (shown.split("\n") or [""]) for row in textwrap.wrap(line, width - len(indent)) or [""]]
    return "\n".join(indent + row for row in wrapped)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run_dir", type=Path, help="a run directory, e.g. runs/quickstart")
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--step", type=int, help="default: the last one recorded")
    which.add_argument("--eval", metavar="SET", help="what launch/evaluate.py generated for this eval set")
    parser.add_argument("--group", type=int, help="only this prompt of the step or set")
    parser.add_argument("--best", type=count, default=0, metavar="K", help="the K samples of highest reward")
    parser.add_argument("--worst", type=count, default=0, metavar="K", help="the K samples of lowest reward")
    args = parser.parse_args(argv)
    try:
        show(args)
    except UserError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    return 0


def count(text: str) -> int:
    """Of an option. Raises argparse's error for what is no whole number of 0 or more."""
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text} is no number of samples: 0 or more")
    return int(text)


def show(args: argparse.Namespace) -> None:
    """Raises ConfigError when there is nothing to show."""
    what, path = step_file(args.run_dir, args.step) if args.eval is None else eval_file(args.run_dir, args.eval)
    samples = read_samples(path)
    if not samples:
        raise ConfigError(f"{path} has no samples to show; monitor.samples_per_step=0 records none")
    chosen = choose(samples, args.group, args.best, args.worst)
    if not chosen:
        raise ConfigError(f"{what} has no group {args.group} among those recorded: {sorted({s['group'] for s in samples})}")
    has_colors = sys.stdout.isatty() and "NO_COLOR" not in os.environ
    width = min(os.get_terminal_size().columns, 160) if sys.stdout.isatty() else 120
    mean = sum(s["reward"] for s in samples) / len(samples)
    print(f"{args.run_dir}, {what}: {len(chosen)} of {len(samples)} recorded samples, whose mean reward is {mean:.3f}")
    for line in lines_of(chosen, (lambda code, text: f"\033[{code}m{text}\033[0m") if has_colors else (lambda code, text: text), width):
        print(line)


if __name__ == "__main__":
    try:
        sys.exit(main())
    except BrokenPipeError:  # piped into head
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        sys.exit(0)
