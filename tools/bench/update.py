"""Tokens/s and MFU of the actor alone: forward, backward and optimizer step, and the forward-only pass that gives log-probabilities.

    python tools/bench/make_model.py qwen2.5-1.5b models/bench-1.5b
    python tools/bench/update.py models/bench-1.5b --profile
    torchrun --nproc-per-node 2 tools/bench/update.py models/bench-1.5b parallel.tp=2 parallel.sp=true

MFU counts the matrix products that the model needs (docs of megaflow/data/cost.py): of layers and causal attention for every token, of the
output head for the rows that get logits; three times the forward pass for training, whatever is computed again. Peak: 989 TFLOP/s.
outside_*_gb: device memory of the trainer beside torch's allocator, after its start, after log-probabilities and after updates.
"""

from __future__ import annotations

import logging
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent.parent))

from tools.bench import actor_alone as alone
from tools.bench import held


def main() -> None:
    parser = alone.arguments("update and logprobs of the actor alone")
    parser.add_argument("--length", type=int, default=2048, help="tokens of a sequence")
    parser.add_argument("--prompt", type=int, default=128, help="of these, tokens of the prompt, which get no logits")
    parser.add_argument("--tokens", type=int, default=65536, help="of an optimizer step, each data-parallel rank")
    parser.add_argument("--profile", action="store_true", help="print the kernels that take the most time")
    options = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(message)s")

    cfg, mesh, actor = alone.build(options.folder, options.overrides)
    count = max(1, options.tokens // options.length) * mesh.dp.size
    lengths = [(options.prompt, options.length - options.prompt)] * count
    mine = alone.spread(alone.made_samples(lengths, actor.shape.vocab_size), mesh, actor)

    outside = {"outside_start_gb": held.outside_gb()}
    forward = alone.median_seconds(mesh, lambda: actor.logprobs(mine), options.repeats)
    logprob_peak = alone.peak_gb()
    outside["outside_logprobs_gb"] = held.outside_gb()
    train = alone.median_seconds(mesh, lambda: alone.update(actor, cfg, mine), options.repeats)
    figures = {
        "sequences": f"{count} x {options.length}",
        "micro_batch_tokens": cfg.actor.micro_batch_tokens,
        **rates("update", actor.shape, lengths, 3, train, mesh.world_size),
        **rates("logprobs", actor.shape, lengths, 1, forward, mesh.world_size),
        "peak_gb": alone.peak_gb(),
        "logprobs_peak_gb": logprob_peak,
        **outside,
        "outside_update_gb": held.outside_gb(),
    }
    if options.profile:
        for name, action in (("update", lambda: alone.update(actor, cfg, mine)), ("logprobs", lambda: actor.logprobs(mine))):
            table = profile(action)
            if mesh.rank == 0:
                print(f"--- {name}: kernels by time on the device\n{table}", flush=True)
    alone.report(mesh, options, figures)


def rates(name: str, shape, lengths: list[tuple[int, int]], passes: int, seconds: float, ranks: int) -> dict[str, float]:
    """passes: 3 for training (the backward pass does the forward's products twice), 1 for the forward pass alone."""
    from megaflow.data.cost import flops

    total, rows = [p + r for p, r in lengths], [r for _, r in lengths]
    each = seconds * ranks * alone.PEAK_FLOPS / passes
    return {
        f"{name}_seconds": seconds,
        f"{name}_tokens_per_s": sum(total) / seconds,
        f"{name}_mfu": flops(shape, total, rows) / each,
        f"{name}_mfu_without_head": flops(shape, total, rows, with_head=False) / each,
    }


def profile(action) -> str:
    """Kernels of one call, by their own time on the device; on a CPU the operators."""
    import torch
    from torch.profiler import ProfilerActivity

    on_cuda = torch.cuda.is_available()
    activities = [ProfilerActivity.CUDA] if on_cuda else [ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities) as found:
        action()
        if on_cuda:
            torch.cuda.synchronize()
    by = "self_device_time_total" if on_cuda else "self_cpu_time_total"
    return found.key_averages().table(sort_by=by, row_limit=40, max_name_column_width=90)


if __name__ == "__main__":
    main()
