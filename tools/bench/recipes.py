"""Each recipe of yaml/recipes on the quickstart task (a tiny model, two-digit sums, CPU): does it learn, and in how many seconds?

    python tools/bench/recipes.py --parallel 8 --json recipes.json
    python tools/bench/recipes.py grpo gspo --backend hf --steps 10

Prints a markdown table: mean reward of the first and the last 5 steps, accuracy on held-out sums before and after, seconds. Every run
uses two ranks and, with --parallel, cores of its own; no GPU is used. The tiny model is made first if it is not there, as `make quickstart`
does.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import SimpleQueue

ROOT = Path(__file__).resolve().parent.parent.parent
STORED = ("dpo", "sft")  # learn from stored data, of which this task has none
RANKS = 2
MEAN_OVER = 5  # steps
# What a recipe leaves to its user: the longest response of this task, for the constant of Dr. GRPO.
OVERRIDES = {"dr_grpo": ["algo.length_constant=8"]}


def main() -> None:
    options = parse()
    out = Path(options.out).resolve()
    make_model()
    slots: SimpleQueue[list[int]] = SimpleQueue()
    for cores in core_sets(options.parallel):
        slots.put(cores)
    with ThreadPoolExecutor(options.parallel) as pool:
        jobs = [pool.submit(measure, name, out, slots, options) for name in options.recipes]
        results = [job.result() for job in jobs]
    print(table(results))
    if options.json:
        Path(options.json).write_text(json.dumps(results, indent=1) + "\n")
    sys.exit(1 if any("error" in result for result in results) else 0)


def parse() -> argparse.Namespace:
    known = sorted(path.stem for path in (ROOT / "yaml/recipes").glob("*.yaml") if path.stem not in STORED)
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipes", nargs="*", default=known, help=f"of {', '.join(known)}; default: all")
    parser.add_argument("--parallel", type=int, default=1, help="runs at once, each on its own share of the cores")
    parser.add_argument("--backend", default="sglang", choices=("sglang", "hf"))
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--timeout", type=float, default=3600.0, help="seconds after which a run is given up")
    parser.add_argument("--out", default="runs/recipes", help="where run directories are made; earlier ones of these recipes are deleted")
    parser.add_argument("--json", help="also write the figures to this file")
    options = parser.parse_args()
    unknown = [name for name in options.recipes if name not in known]
    if unknown:
        parser.error(f"no recipe {', '.join(unknown)}; there are {', '.join(known)}")
    return options


def make_model() -> None:
    """models/tiny and data/addition, unless a whole one is there (the stamp is that of the Makefile)."""
    stamp = ROOT / "models/tiny/.made"
    if not stamp.exists() or not (ROOT / "data/addition").is_dir():
        command = [sys.executable, "tools/make_tiny_model.py", "--out", "models/tiny", "--data", "data/addition"]
        subprocess.run(command, cwd=ROOT, env=environment(), check=True)
        stamp.touch()


def core_sets(parallel: int) -> list[list[int]]:
    """The cores that this process may use, in `parallel` shares of at least one."""
    cores = sorted(os.sched_getaffinity(0))
    size = max(1, len(cores) // parallel)
    return [[cores[(i * size + j) % len(cores)] for j in range(size)] for i in range(parallel)]


def environment() -> dict[str, str]:
    return {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}


def measure(name: str, out: Path, slots: SimpleQueue, options: argparse.Namespace) -> dict:
    """Run a recipe and read what it left: the row of the table, or the reason why there is none."""
    shutil.rmtree(out / name, ignore_errors=True)
    cores = slots.get()
    begin = time.perf_counter()
    try:
        code = run(name, out, cores, options)
    finally:
        slots.put(cores)
    seconds = time.perf_counter() - begin
    row: dict = {"recipe": name, "steps": options.steps, "backend": options.backend, "seconds": round(seconds, 1)}
    if code != 0:
        return row | {"error": f"ended with {code}: see {out / f'{name}.log'}"}
    lines = [json.loads(line) for line in (out / name / "metrics.jsonl").read_text().splitlines()]
    rewards = [line["reward/mean"] for line in lines if line["step"] > 0]
    accuracy = [line["eval/addition/accuracy"] for line in lines if "eval/addition/accuracy" in line]
    row |= {"reward_first": mean(rewards[:MEAN_OVER]), "reward_last": mean(rewards[-MEAN_OVER:])}
    return row | {"accuracy_before": accuracy[0], "accuracy_after": accuracy[-1]}


def run(name: str, out: Path, cores: list[int], options: argparse.Namespace) -> int:
    """Exit code of the run; 124 when it takes longer than --timeout. Its output goes to <out>/<name>.log."""
    out.mkdir(parents=True, exist_ok=True)
    config = out / f"{name}.yaml"
    config.write_text(f"base: [{ROOT}/yaml/quickstart.yaml, {ROOT}/yaml/recipes/{name}.yaml]\n")
    script = "launch/train_ppo.py" if name.startswith("ppo") else "launch/train_grpo.py"
    launcher = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(RANKS), "--master-addr", "127.0.0.1"]
    command = [*launcher, "--master-port", str(free_port()), script, "--config", str(config)]
    command += [f"run.name={name}", f"run.root={out}", f"run.steps={options.steps}", "run.save_every=0", "run.save_final=false"]
    command += [f"rollout.backend={options.backend}", "eval.before=true", "eval.after=true", "monitor.plot=false", *OVERRIDES.get(name, [])]
    os.sched_setaffinity(0, cores)  # of this thread, and of what it starts
    with (out / f"{name}.log").open("w") as log:
        process = subprocess.Popen(command, cwd=ROOT, env=environment(), stdout=log, stderr=subprocess.STDOUT, start_new_session=True)
        print(f"{name}: started on cores {cores[0]}-{cores[-1]}", file=sys.stderr, flush=True)
        try:
            code = process.wait(options.timeout)
        except subprocess.TimeoutExpired:
            code = 124
        finally:
            end(process)
    print(f"{name}: ended with {code}", file=sys.stderr, flush=True)
    return code


def end(process: subprocess.Popen) -> None:
    """The run and whatever it started, which is all of one session."""
    with contextlib.suppress(ProcessLookupError):  # all of it has ended by itself
        os.killpg(process.pid, 9)
    process.wait()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def mean(values: list[float]) -> float:
    return sum(values) / len(values)


def table(results: list[dict]) -> str:
    """Markdown."""
    lines = [
        f"| recipe | reward, first {MEAN_OVER} steps | last {MEAN_OVER} | held-out accuracy before | after | seconds |",
        "|---|---|---|---|---|---|",
    ]
    for row in results:
        if "error" in row:
            lines.append(f"| `{row['recipe']}` | {row['error']} | | | | {row['seconds']:.0f} |")
        else:
            figures = [f"{row[k]:.3f}" for k in ("reward_first", "reward_last", "accuracy_before", "accuracy_after")]
            lines.append(f"| `{row['recipe']}` | {' | '.join(figures)} | {row['seconds']:.0f} |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
