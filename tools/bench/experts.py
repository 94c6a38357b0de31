"""Experts in one product against experts one after another: tokens/s of an update and of log-probabilities, and how the results differ.

    python tools/bench/make_model.py qwen3-moe-3b models/bench-moe-3b
    python tools/bench/experts.py models/bench-moe-3b
    torchrun --nproc-per-node 2 tools/bench/experts.py models/bench-moe-3b parallel.ep=2

Both in one run, from the same weights and samples. On a CPU: a model of make_model.py qwen3-moe-tiny, --tokens 512 --length 64 --prompt 16.
"""

from __future__ import annotations

import gc
import logging
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent.parent))

from tools.bench import actor_alone as alone

WAYS = ("sequential", "grouped")


def main() -> None:
    parser = alone.arguments("grouped against sequential experts")
    parser.add_argument("--length", type=int, default=2048, help="tokens of a sequence")
    parser.add_argument("--prompt", type=int, default=128, help="of these, tokens of the prompt, which get no logits")
    parser.add_argument("--tokens", type=int, default=65536, help="of an optimizer step, each data-parallel rank")
    options = parser.parse_intermixed_args()
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    import torch

    mesh, figures, logps = None, {}, {}
    for way in WAYS:
        mesh, found, logps[way] = measured(options, way, mesh)
        figures |= {f"{way}_{name}": value for name, value in found.items()}
        gc.collect()  # the optimizer's state, and what else refers to itself
        torch.cuda.empty_cache()
    for name in ("update_tokens_per_s", "logprobs_tokens_per_s"):
        figures[f"grouped_over_sequential_{name.partition('_')[0]}"] = figures[f"grouped_{name}"] / figures[f"sequential_{name}"]
    figures |= difference(logps, figures)
    alone.report(mesh, options, figures)


def measured(options, way: str, mesh):
    """(mesh, figures, this rank's log-probabilities before the first update)."""
    import torch

    from megaflow.config.loading import load
    from megaflow.parallel.mesh import Mesh
    from megaflow.trainer.build import build_actor

    settings = [f"model.path={options.folder}", "actor.micro_batch_tokens=16384", *options.overrides, f"model.experts={way}"]
    cfg = load(None, settings).config
    mesh = mesh or Mesh.create(cfg.parallel)
    held_gb = allocated_gb()
    actor = build_actor(cfg, mesh)
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
    count = max(1, options.tokens // options.length) * mesh.dp.size
    lengths = [(options.prompt, options.length - options.prompt)] * count
    mine = alone.spread(alone.made_samples(lengths, actor.shape.vocab_size), mesh, actor)
    logps = torch.cat([logp.float().cpu() for logp in actor.logprobs(mine)])
    norm = first_norm(actor, cfg, mine)
    forward = alone.median_seconds(mesh, lambda: actor.logprobs(mine), options.repeats)
    train = alone.median_seconds(mesh, lambda: alone.update(actor, cfg, mine), options.repeats)
    tokens = options.length * count
    figures = {
        "update_tokens_per_s": tokens / train,
        "logprobs_tokens_per_s": tokens / forward,
        "first_grad_norm": norm,
        "peak_gb": alone.peak_gb() - held_gb,
    }
    free_buffers(actor)
    return mesh, figures, logps


def allocated_gb() -> float:
    import torch

    return torch.cuda.memory_allocated() / 1e9 if torch.cuda.is_available() else 0.0


def free_buffers(actor) -> None:
    """Megatron's hooks on gradients hold their model for ever, and the next one needs the memory. The optimizer's fp32 weights stay."""
    for buffer in actor.model.grad_buffers:
        for data in (buffer.grad_data, buffer.param_data):
            if data is not None:
                data.untyped_storage().resize_(0)


def first_norm(actor, cfg, mine) -> float:
    from megaflow.algo.losses import objective

    return actor.update(mine, objective, cfg.algo)["train/grad_norm"]


def difference(logps: dict, figures: dict) -> dict[str, float]:
    """Of the two ways, of the same weights: rounding, if all is well."""
    d = (logps["grouped"] - logps["sequential"]).abs()
    norms = [figures[f"{way}_first_grad_norm"] for way in WAYS]
    return {"logp_abs_diff": float(d.mean()), "logp_max_diff": float(d.max()), "grad_norm_ratio": norms[1] / norms[0]}


if __name__ == "__main__":
    main()
