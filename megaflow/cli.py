"""The command line of the launch scripts. Answers --help, --print-config and a configuration error without importing torch."""

from __future__ import annotations

import argparse
import importlib
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

from megaflow import slurm
from megaflow.config.caches import use_cache_dir
from megaflow.config.checks import check
from megaflow.config.ledger import Ledger
from megaflow.config.loading import Loaded, load
from megaflow.config.notices import notices
from megaflow.config.schema import Config
from megaflow.trainer.relaunch import is_restart
from megaflow.trainer.status import previous_status
from megaflow.types import ConfigError, PreflightError, UserError

# torchrun kills the other ranks within 0.1 s of the first exit. Were they to exit before rank 0, its message could be lost.
SECONDS_FOR_RANK_0 = 3.0
RANKS_PER_HOST = 8  # that a plan takes with --world-size
PLANNED = ("train", "offline")  # purposes
INSTEAD = "plan the training run: launch/train_grpo.py"


def main(train: str, program_doc: str, purpose: str = "train") -> None:
    """Load, check and run. `train` is "package.module:function", imported after the checks and called with the Config.

    `purpose`: train, offline, evaluate, generate; says which checks apply, and whether there is --plan.
    Exits with the codes of docs/running.md; `train` may SystemExit.
    """
    try:
        slurm.adopt(os.environ)
        options = _options(sys.argv[1:])
        if options.help:
            from megaflow.config.help import help_text

            _print_on_rank0(help_text(program_doc, plans=purpose in PLANNED))
            return
        if options.plan and purpose not in PLANNED:
            raise ConfigError(f"command line: --plan is of the steps of a training run, and this does not train; {INSTEAD}")
        loaded = load(options.config, options.overrides)
        if options.print_config:
            from megaflow.config.printing import as_yaml

            _print_on_rank0(as_yaml(loaded).rstrip())
        world_size = options.world_size or int(os.environ.get("WORLD_SIZE", "1"))
        ranks_per_host = None if options.world_size else int(os.environ.get("LOCAL_WORLD_SIZE", world_size))
        if options.plan:
            ranks_per_host = ranks_per_host or min(RANKS_PER_HOST, world_size)
        check(loaded, world_size, ranks_per_host, purpose, with_files=not options.plan)
        if purpose in ("train", "offline"):
            run = loaded.config.run
            is_restart(previous_status(Path(run.root) / run.name / "status.json"))  # before torch: a start that is none takes no time
    except UserError as error:
        _leave(error, seen_by_all=True)
    if options.plan:
        sys.exit(_plan(loaded, world_size, options.device, ranks_per_host))
    use_cache_dir(loaded.config.run.cache_dir)  # before torch is imported
    if not options.print_config or options.dry_run:
        _preflight(loaded, world_size, options.dry_run, purpose)
    if not options.print_config and not options.dry_run:
        _run(train, loaded.config)


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"command line: {message}; see --help")


def _options(arguments: list[str]) -> argparse.Namespace:
    parser = _Parser(add_help=False, allow_abbrev=False)
    parser.add_argument("--config")
    parser.add_argument("--print-config", action="store_true")
    parser.add_argument("--dry-run", action="store_true")
    parser.add_argument("--plan", action="store_true")
    parser.add_argument("--device")
    parser.add_argument("--world-size", type=int)
    parser.add_argument("--help", "-h", action="store_true")
    parser.add_argument("overrides", nargs="*")
    options = parser.parse_intermixed_args(arguments)
    if options.world_size is not None and not (options.print_config or options.dry_run or options.plan):
        raise ConfigError("command line: --world-size goes with --dry-run or --print-config or --plan; torchrun says how many ranks train")
    if options.device is not None and not options.plan:
        raise ConfigError("command line: --device goes with --plan; a run takes the devices that are there")
    if options.world_size is not None and options.world_size < 1:
        raise ConfigError(f"command line: --world-size {options.world_size} must be at least 1")
    return options


def _plan(loaded: Loaded, world_size: int, device: str | None, ranks_per_host: int) -> int:
    """One rank says it for all."""
    if _rank() != 0:
        return 0
    try:
        return show_plan(loaded, world_size, device or "h200", ranks_per_host=ranks_per_host)
    except UserError as error:
        _leave(error, seen_by_all=True)


def show_plan(loaded: Loaded, world_size: int, device: str, mfu: float = 0.35, ranks_per_host: int = RANKS_PER_HOST) -> int:
    """Print memory by phase, traffic and time; the exit code: 0, or 3 if it does not fit. Of the model config.json is read, no weights.

    Raises ConfigError for an unknown device, PreflightError for a model that is not there or is not divided by the configuration.
    """
    from megaflow.plan import preflight
    from megaflow.plan.hardware import device_named
    from megaflow.trainer.planning import plan_run

    chosen = device_named(device)
    preflight.check(loaded, world_size, preflight.CHECKS_OF_SIZES)
    planned = plan_run(loaded.config, world_size, chosen, mfu, ranks_per_host)
    print(planned.text(), flush=True)
    return 0 if planned.fits() else PreflightError.exit_code


def _preflight(loaded: Loaded, world_size: int, is_dry_run: bool, purpose: str) -> None:
    """One rank a host looks at files and model before anyone allocates; the others wait for it where all first meet."""
    if int(os.environ.get("LOCAL_RANK", "0")) != 0:
        return
    from megaflow.plan import preflight
    from megaflow.trainer.start_checks import of_a_dry_run, of_a_start

    more = of_a_dry_run(purpose) if is_dry_run else of_a_start()
    try:
        facts = preflight.check(loaded, world_size, [*preflight.CHECKS, *more])
    except UserError as error:
        _leave(error, seen_by_all=False)
    if _rank() != 0:
        return
    for notice in notices(loaded.config):
        print(f"notice: {notice}", flush=True)
    print("batches, in sequences:", Ledger.of(loaded.config, world_size).table(), sep="\n", flush=True)
    if is_dry_run:
        print("checked:", *(f"  {fact}" for fact in facts), sep="\n")
        print(f"nothing was started; this configuration is ready to run on {world_size} rank(s)")


def _run(train: str, config: Config) -> None:
    """Run `train(config)`; `record` lets torchrun show the exception of the rank that failed first."""
    from torch.distributed.elastic.multiprocessing.errors import record

    module, _, function = train.partition(":")

    def run() -> None:
        call: Callable[[Config], None] = getattr(importlib.import_module(module), function)
        try:
            call(config)
        except UserError as error:
            _leave(error, seen_by_all=False)

    record(run)()


def _leave(error: UserError, seen_by_all: bool) -> NoReturn:
    """Say it once. Rank 0 speaks; another rank only if rank 0 lives on after a while, so that the mistake is this rank's alone."""
    if _rank() == 0:
        print(error, file=sys.stderr, flush=True)
    else:
        time.sleep(SECONDS_FOR_RANK_0)
        if not seen_by_all:
            print(f"rank {_rank()}: {error}", file=sys.stderr, flush=True)
    sys.exit(error.exit_code)


def _print_on_rank0(text: str) -> None:
    if _rank() != 0:
        return
    try:
        print(text, flush=True)
    except BrokenPipeError:  # `--help | head`; the interpreter would complain again when it flushes at the end
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _rank() -> int:
    return int(os.environ.get("RANK", "0"))
