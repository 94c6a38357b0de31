"""An actor without an engine, samples of given lengths, medians of what it does: what the benchmarks of update, packing, offload share."""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent.parent))

PEAK_FLOPS = 989e12  # dense bf16 of an H100 or H200 SXM, NVIDIA's data sheet


def arguments(description: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("folder", help="a model folder, e.g. of tools/bench/make_model.py")
    parser.add_argument("overrides", nargs="*", help="configuration keys, e.g. parallel.tp=2 model.kernels=plain")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--json", help="file that gets the figures")
    return parser


def build(folder: str, overrides: list[str]) -> tuple[Any, Any, Any]:
    """(config, mesh, actor)."""
    from megaflow.config.loading import load
    from megaflow.parallel.mesh import Mesh
    from megaflow.trainer.build import build_actor

    cfg = load(None, [f"model.path={folder}", "actor.micro_batch_tokens=16384", *overrides]).config
    mesh = Mesh.create(cfg.parallel)
    return cfg, mesh, build_actor(cfg, mesh)


def made_samples(lengths: list[tuple[int, int]], vocab: int) -> list[Any]:
    """lengths: (prompt, response) of each. With all that an update reads, made up."""
    import torch

    from megaflow.types import Prompt, Sample

    g = torch.Generator().manual_seed(0)
    made = []
    for i, (prompt, response) in enumerate(lengths):
        tokens = torch.randint(3, vocab, (prompt + response,), generator=g)
        s = Sample(Prompt(f"made:{i}", tokens[:prompt].tolist(), ""), i, 0, tokens[prompt:], torch.full((response,), -11.0), "stop", 0)
        s.old_logp, s.advantage = s.rollout_logp.clone(), 1.0 if i % 2 else -1.0
        made.append(s)
    return made


def spread(samples: list[Any], mesh: Any, actor: Any) -> list[Any]:
    """This rank's part."""
    return mesh.scatter(samples if mesh.rank == 0 else [], actor.cost.balanced)


def update(actor: Any, cfg: Any, samples: list[Any]) -> None:
    from megaflow.algo.losses import objective

    actor.update(samples, objective, cfg.algo)


def median_seconds(mesh: Any, action: Callable[[], Any], repeats: int, warm_up: int = 2) -> float:
    from megaflow.parallel import device

    found = []
    for _ in range(warm_up + repeats):
        mesh.barrier()
        device.synchronize()
        start = time.perf_counter()
        action()
        device.synchronize()
        mesh.barrier()
        found.append(time.perf_counter() - start)
    return statistics.median(found[warm_up:])


def peak_gb() -> float:
    import torch

    return torch.cuda.max_memory_allocated() / 1e9 if torch.cuda.is_available() else 0.0


def report(mesh: Any, options: argparse.Namespace, figures: dict[str, Any]) -> None:
    """On rank 0: one figure a line, and the file of --json."""
    import torch

    if mesh.rank == 0:
        name = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
        figures = {"device": name, "ranks": mesh.world_size, "torch": torch.__version__, "model": Path(options.folder).name, **figures}
        for key, value in figures.items():
            print(f"  {key:32} {value:.4g}" if isinstance(value, float) else f"  {key:32} {value}", flush=True)
        if options.json:
            Path(options.json).write_text(json.dumps(figures, indent=1) + "\n")
    mesh.close()
