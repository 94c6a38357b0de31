"""What the benchmarks of the engine and of the whole loop share: arguments, an engine without an actor, the file of figures."""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import shlex
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

PACKAGES = ("torch", "sglang", "megatron-core", "triton")


def arguments(doc: str, repeats: int = 5) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", help="Hugging Face folder of the model (tools/bench/make_model.py makes random ones)")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="config keys, e.g. rollout.tp=2 rollout.mem_fraction=0.5")
    parser.add_argument("--repeats", type=int, default=repeats, help="medians over so many, after one that warms up (default: %(default)s)")
    parser.add_argument("--json", help="file that gets the figures, for tools/bench/report.py")
    return parser


def build(folder: str, overrides: list[str]) -> tuple[Any, Any, Any]:
    """Collective. (config, mesh, SGLang rollout that has started). Its weights are random: nothing was synchronised."""
    from megaflow.config.caches import use_cache_dir
    from megaflow.config.loading import load

    cfg = load(None, [f"model.path={folder}", *overrides]).config
    use_cache_dir(cfg.run.cache_dir)
    from megaflow.data import load_tokenizer
    from megaflow.monitor.collector import spare_what_is_there
    from megaflow.parallel.mesh import Mesh
    from megaflow.rollout import BACKENDS
    from megaflow.trainer.build import stop_token_ids

    mesh = Mesh.create(cfg.parallel, cfg.rollout.tp, cfg.run.timeout_s)
    tokenizer = load_tokenizer(folder)
    rollout = BACKENDS.get("sglang")(cfg, mesh, tokenizer, stop_token_ids(folder, tokenizer))
    rollout.await_start()
    spare_what_is_there()  # as a run does
    return cfg, mesh, rollout


def median(action: Callable[[], float], repeats: int) -> float:
    """Of what the action returns, after one call that warms up."""
    return statistics.median([action() for _ in range(repeats + 1)][1:])


def device_gb() -> float:
    """In use on this GPU by all processes, 1e9 bytes; 0 without one."""
    from megaflow.monitor.memory import GB, CudaProbe
    from megaflow.parallel import device

    return CudaProbe().device_used() / GB if device.on_cuda() else 0.0


def facts() -> dict[str, Any]:
    """What a figure depends on beside the code."""
    import torch

    on_cuda = torch.version.cuda is not None and torch.cuda.is_available()
    versions = {name: importlib.metadata.version(name) for name in PACKAGES}
    name = torch.cuda.get_device_name() if on_cuda else "CPU"
    return {"device": name, "versions": versions, "command": shlex.join(["python", *sys.argv])}


def report(tool: str, options: argparse.Namespace, figures: dict[str, Any]) -> None:
    """One figure a line, and the file of --json."""
    for key, value in figures.items():
        print(f"  {key:36} {value:.4g}" if isinstance(value, float) else f"  {key:36} {value}", flush=True)
    if options.json:
        known = {"tool": tool, "model": Path(options.folder).name, **facts()}
        Path(options.json).write_text(json.dumps({**known, **figures}, indent=1) + "\n")
