"""A real training run, and what its steps cost beside the phases: overhead, memory that stays, mismatch, samples/s; how two GPUs scale.

    python tools/bench/make_model.py qwen2.5-1.5b models/bench-1.5b
    python tools/bench/step.py models/bench-1.5b
    python tools/bench/step.py models/bench-1.5b --gpus 2

Every sample has the same length (sampling.ignore_eos), so all steps do the same work. `overhead` is the median step less the sum of
rollout, reward, log-probabilities and update at their stand-alone speed (tools/bench/phases.py: the same work, each phase again and again,
nothing between them), as part of the step. With --gpus 2 the run is made on one GPU and on two, data-parallel, the same work for each.
On a CPU: --steps 4 --prompts 2 --new 8 rollout.backend=hf.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent.parent))

from tools.bench import engine_alone as alone

ROOT = Path(__file__).resolve().parent.parent.parent

PHASES = ("rollout", "reward", "logprob", "update")
FIRST = 3  # steps before it compile and warm up


def main() -> None:
    parser = alone.arguments(__doc__)
    parser.add_argument("--gpus", type=int, default=1, help="2: also the same run on two")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--prompts", type=int, default=32, help="of a step, for each GPU; 8 samples each")
    parser.add_argument("--new", type=int, default=512, help="tokens of a response")
    parser.add_argument("--one", help="with --gpus 2: what --json of a run on one GPU wrote, in place of making that run again")
    options = parser.parse_intermixed_args()
    with tempfile.TemporaryDirectory() as folder:
        figures = measured_before(options.one) if options.one else on_one(options, Path(folder))
        if options.gpus > 1:
            several = figures_of(train(options, options.gpus, Path(folder) / "several"), options.prompts * 8 * options.gpus)
            figures |= {f"on_{options.gpus}_{name}": value for name, value in several.items()}
            figures["scaling"] = several["samples_per_s"] / figures["samples_per_s"]
    alone.report("step", options, figures | {"gpus": options.gpus, "steps": options.steps} | alone.facts())


def measured_before(file: str) -> dict[str, float]:
    """What two GPUs are compared with; the rest of the figures stays in that file."""
    return {"samples_per_s": json.loads(Path(file).read_text())["samples_per_s"]}


def on_one(options, folder: Path) -> dict:
    lines = train(options, 1, folder / "one")
    return figures_of(lines, options.prompts * 8) | against_alone(lines, phases(options, folder))


def settings(options, ranks: int) -> list[str]:
    """Of the run and of its phases alone."""
    return [
        f"model.path={options.folder}", f"run.steps={options.steps}", "run.save_every=0", "run.save_final=false", "monitor.plot=false",
        f"data.train=[{{path: 'reasoning-gym:chain_sum', limit: {max(512, 64 * options.prompts)}}}]", "data.template=plain",
        "reward.functions=[{name: number}]", f"rollout.prompts_per_step={options.prompts * ranks}", "rollout.samples_per_prompt=8",
        "rollout.mem_fraction=0.4", f"sampling.max_new_tokens={options.new}", "sampling.ignore_eos=true",
        "eval.before=false", "eval.after=false",
        f"actor.mini_batch={options.prompts * ranks * 4}", "actor.micro_batch_tokens=16384", *options.overrides,
    ]  # fmt: skip


def train(options, ranks: int, root: Path) -> list[dict]:
    """The lines of metrics.jsonl."""
    run(ranks, ["launch/train_grpo.py", *settings(options, ranks), f"run.root={root}"])
    return [json.loads(line) for line in next(root.glob("*/metrics.jsonl")).read_text().splitlines()]


def phases(options, folder: Path) -> dict[str, float]:
    """Seconds of each phase alone, on one GPU."""
    out = folder / "phases.json"
    run(1, ["tools/bench/phases.py", str(out), *settings(options, 1), f"run.root={folder}"])
    return json.loads(out.read_text())


def run(ranks: int, command: list[str]) -> None:
    launcher = ["-m", "torch.distributed.run", "--nproc-per-node", str(ranks), "--master-addr", "127.0.0.1"]
    started = [sys.executable, *(launcher if ranks > 1 else []), str(ROOT / command[0]), *command[1:]]
    done = subprocess.run(started, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"{command[0]} on {ranks} ended with {done.returncode}:\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}")


def figures_of(lines: list[dict], samples: int) -> dict[str, Any]:
    """samples: of a step. Medians over the steps that are warm; memory in MB by which the last step is above the third."""
    warm = [line for line in lines if line["step"] >= FIRST]
    step_s = statistics.median(line["time/step"] for line in warm)
    name = "mem/rollout/device_gb" if "mem/rollout/device_gb" in warm[0] else "mem/after_sleep_gb"
    growth = warm[-1][name] - warm[0][name]
    found = {"step_s": step_s, "samples_per_s": samples / step_s, "memory_growth_mb": growth * 1e3, "memory_after_sleep_gb": warm[-1][name]}
    found["mismatch"] = statistics.mean(line["mismatch/logp_abs_diff"] for line in warm)
    found["rollout_tokens_per_s"] = statistics.median(line["rollout/tokens_per_s"] for line in warm)
    times = {n for line in warm for n in line if n.startswith("time/") and n != "time/step" and "startup" not in n}
    found |= {f"{n.removeprefix('time/')}_s": statistics.median(line.get(n, 0.0) for line in warm) for n in sorted(times)}
    found["between_phases_s"] = step_s - sum(found[f"{n.removeprefix('time/')}_s"] for n in times)
    for name in ("time/step", "time/rollout"):
        found[f"each_{name.removeprefix('time/')}_s"] = [round(line[name], 3) for line in warm]
    return found


def against_alone(lines: list[dict], alone_s: dict[str, float]) -> dict[str, float]:
    """The overhead of a step over its phases at their stand-alone speed, seconds and as part of the step."""
    step_s = statistics.median(line["time/step"] for line in lines if line["step"] >= FIRST)
    overhead = step_s - sum(alone_s[phase] for phase in PHASES)
    return {f"{phase}_alone_s": alone_s[phase] for phase in PHASES} | {"overhead_s": overhead, "overhead_of_step": overhead / step_s}


if __name__ == "__main__":
    main()
