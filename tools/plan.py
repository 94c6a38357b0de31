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
    parser.add_argument("--world-size", type=count, default=1, help="ranks (default: 1; of a run: its own)")
    parser.add_argument("--device", default="", help=f"{', '.join(DEVICES)} (default: h200; of a run: its own)")
    parser.add_argument("--mfu", type=part, default=0.35, help="part of the device's bf16 operations that the trainer reaches")
    parser.add_argument("--ranks-per-host", type=count, default=8, help="of a host (default: 8); an engine lives on one")
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


def count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text} must be a whole number, at least 1")
    return int(text)


def part(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value <= 1:
        raise argparse.ArgumentTypeError(f"{text} must be a part, above 0 and at most 1, e.g. 0.4 for 40%")
    return value


def before(options: argparse.Namespace) -> int:
    from megaflow.cli import show_plan
    from megaflow.config.checks import check
    from megaflow.config.loading import load

    loaded = load(options.config, options.what)
    ranks_per_host = min(options.ranks_per_host, options.world_size)
    check(loaded, options.world_size, ranks_per_host, with_files=False)
    return show_plan(loaded, options.world_size, options.device or "h200", options.mfu, ranks_per_host)


def after(path: Path, options: argparse.Namespace) -> int:
    from megaflow.trainer.planned_run import compare

    print(compare(path, options.device, options.mfu))
    return 0


if __name__ == "__main__":
    sys.exit(main())
