"""Seconds from the launch of a training run to the first generated token, and what they go to. The run is started twice.

    python tools/bench/make_model.py qwen2.5-1.5b models/bench-1.5b
    python tools/bench/startup.py models/bench-1.5b --cold

The second start finds the kernels that the first has compiled. With --cold the first starts with an empty run.cache_dir, which the second
then uses; without it the first finds whatever is there. (Files that the system has in memory stay there: `cold` is for kernels only.)
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent.parent))

from tools.bench import engine_alone as alone

ROOT = Path(__file__).resolve().parent.parent.parent

# One short step. Neither checkpoint nor curve: this is about the beginning.
SETTINGS = (
    "run.steps=1", "run.save_every=0", "run.save_final=false", "monitor.plot=false",
    "data.train=[{path: 'reasoning-gym:chain_sum', limit: 64}]",
    "data.template=plain", "reward.functions=[{name: number}]", "rollout.prompts_per_step=8", "rollout.samples_per_prompt=8",
    "sampling.max_new_tokens=16", "eval.before=false", "eval.after=false",
)  # fmt: skip


def main() -> None:
    parser = alone.arguments(__doc__)
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--cold", action="store_true", help="the first start has no compiled kernels")
    options = parser.parse_intermixed_args()
    figures: dict = {"ranks": options.ranks}
    with tempfile.TemporaryDirectory() as folder:
        cache = [f"run.cache_dir={folder}/cache"] if options.cold else []
        for name in ("first", "second"):
            facts = start(options, [*SETTINGS, f"run.root={folder}/{name}", *cache, *options.overrides], Path(folder) / name)
            figures |= {f"{name}_{part}": seconds for part, seconds in facts.items()}
    alone.report("startup", options, figures)


def start(options, settings: list[str], root: Path) -> dict[str, float]:
    """Seconds by part; `to_first_token` counts from here, the others from the start of rank 0's process, which torchrun makes."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(options.ranks), "--master-addr", "127.0.0.1"]
    program = [*(launcher if options.ranks > 1 else [sys.executable]), str(ROOT / "launch" / "train_grpo.py")]
    began = time.time()
    done = subprocess.run([*program, f"model.path={options.folder}", *settings], capture_output=True, text=True)
    took = time.time() - began
    if done.returncode:
        sys.exit(f"the run ended with {done.returncode}:\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}")
    env = json.loads(next(root.glob("*/env.json")).read_text())
    facts = env["startup_s"]
    return {"to_first_token": env["process_began"] - began + facts["first_token"], **facts, "whole_run": took}


if __name__ == "__main__":
    main()
