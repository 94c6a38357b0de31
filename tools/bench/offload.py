"""Sleep and wake of the actor with actor.offload=optimizer and all, GB/s against a plain pinned copy of as many bytes in the same run.

    python tools/bench/offload.py models/bench-1.5b
"""

from __future__ import annotations

import statistics
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent.parent))

from tools.bench import actor_alone as alone

COPY_BYTES = 1 << 30


def main() -> None:
    options = alone.arguments("sleep and wake").parse_args()
    _, mesh, actor = alone.build(options.folder, options.overrides)
    figures: dict[str, float] = {}
    blocks: list = []  # pinned host memory, the same for both: allocating it is slow
    for mode in ("all", "optimizer"):
        figures |= measured(actor, mode, options.repeats, blocks)
    figures |= {f"pinned_copy_{way}_gb_per_s": speed for way, speed in pinned_copy(options.repeats).items()}
    for mode in ("optimizer", "all"):
        for phase, way in (("sleep", "to_host"), ("wake", "to_device")):
            figures[f"{mode}_{phase}_of_pinned"] = figures[f"{mode}_{phase}_gb_per_s"] / figures[f"pinned_copy_{way}_gb_per_s"]
    alone.report(mesh, options, figures)


def measured(actor, mode: str, repeats: int, blocks: list) -> dict[str, float]:
    """The first sleep allocates the host memory that `blocks` lacks: seconds of its own. Then medians."""
    from megaflow.actor.memory import Sleeper

    sleeper = Sleeper(actor.model, actor.optimizer, mode, on_cpu=True)
    sleeper.parking.blocks = blocks
    seconds: dict[str, list[float]] = {"sleep": [], "wake": []}
    for _ in range(1 + repeats):
        sleeper.sleep()
        sleeper.wake()
        for phase, value in sleeper.seconds.items():
            seconds[phase].append(value)
    gb = sleeper.nbytes / 1e9
    found = {f"{mode}_gb": gb, f"{mode}_first_sleep_seconds": seconds["sleep"][0]}
    return found | {f"{mode}_{phase}_gb_per_s": gb / statistics.median(values[1:]) for phase, values in seconds.items()}


def pinned_copy(repeats: int) -> dict[str, float]:
    """GB/s of copies of 1 GiB between the device and pinned host memory, each way."""
    import torch

    from megaflow.parallel import device

    on_device = torch.zeros(COPY_BYTES, dtype=torch.uint8, device=device.device())
    host = torch.zeros(COPY_BYTES, dtype=torch.uint8, pin_memory=device.on_cuda())
    speeds = {}
    for way, (target, source) in {"to_host": (host, on_device), "to_device": (on_device, host)}.items():
        seconds = []
        for _ in range(2 + repeats):
            device.synchronize()
            start = time.perf_counter()
            for _ in range(4):
                target.copy_(source, non_blocking=True)
            device.synchronize()
            seconds.append(time.perf_counter() - start)
        speeds[way] = 4 * COPY_BYTES / 1e9 / statistics.median(seconds[2:])
    return speeds


if __name__ == "__main__":
    main()
