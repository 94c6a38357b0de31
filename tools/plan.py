"""Will it fit, how long will a step take, and what to change; or, after a run, what was planned against what was measured.

    python tools/plan.py --config yaml/qwen7b.yaml --world-size 8 --device h100 actor.micro_batch_tokens=4096
    python tools/plan.py runs/quickstart

The first needs the model's config.json alone, no weights and no GPU. Exit code 3: it does not fit.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # so that a clone works without installation

from megaflow.plan.hardware import DEVICES
from megaflow.types import UserError


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False)
    parser.add_argument("what", nargs="*", metavar="RUN | section.key=value", help="a run directory; or overrides of --config")
    parser.add_argument("--config", help="plan this configuration")
    parser.add_argument("--world-size", type=int, default=1, help="ranks (default: 1; of a run: its own)")
    parser.add_argument("--device", default="", help=f"{', '.join(DEVICES)} (default: h200; of a run: its own)")
    parser.add_argument("--mfu", type=float, default=0.35, help="part of the device's bf16 operations that the trainer reaches")
    parser.add_argument("--ranks-per-host", type=int, default=8)
    options = parser.parse_intermixed_args()
    try:
        if options.config is not None:
            return before(options)
        if len(options.what) != 1:
            parser.error("give a run directory, or --config FILE")
        return after(Path(options.what[0]), options)
    except UserError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    except BrokenPipeError:  # `| head`; the interpreter would complain again when it flushes at the end
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0


def before(options: argparse.Namespace) -> int:
    from megaflow.cli import show_plan
    from megaflow.config.checks import check
    from megaflow.config.loading import load

    loaded = load(options.config, options.what)
    check(loaded, options.world_size)
    return show_plan(loaded, options.world_size, options.device or "h200", options.mfu, options.ranks_per_host)


def after(path: Path, options: argparse.Namespace) -> int:
    from megaflow.trainer.planned_run import compare

    print(compare(path, options.device, options.mfu))
    return 0


if __name__ == "__main__":
    sys.exit(main())
