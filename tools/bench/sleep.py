"""Milliseconds in which the engine goes to sleep and wakes, with a KV cache of a given size.

    python tools/bench/make_model.py qwen2.5-1.5b models/bench-1.5b
    python tools/bench/sleep.py models/bench-1.5b --kv-gb 60

As in a step: sleep releases weights and cache (and waits until the last batch is done), wake takes the weights back, then the cache, and
between the two lie log-probabilities and update (--between seconds). `at_once_ms` is sleep and wake with nothing between: the driver
clears memory before it gives it to somebody else, and a wake that comes first waits for that. rollout.sleep_level=1 also copies the weights
to host memory and back. On a CPU: --kv-gb 0.05 --between 0.
"""

from __future__ import annotations

import statistics
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent.parent))

from tools.bench import engine_alone as alone
from tools.bench import held


def main() -> None:
    parser = alone.arguments(__doc__, repeats=10)
    parser.add_argument("--kv-gb", type=float, default=60.0, help="size of the KV cache, 1e9 bytes")
    parser.add_argument("--between", type=float, default=1.0, help="seconds between sleep and wake (default: %(default)s)")
    options = parser.parse_intermixed_args()
    cfg, mesh, rollout = alone.build(options.folder, [f"rollout.max_tokens={tokens_of(options)}", *options.overrides])
    level = int(cfg.rollout.sleep_level)
    turns = [turn(rollout, level, options.between) for _ in range(options.repeats + 1)][1:]
    at_once = [turn(rollout, level, 0.0)["sleep_and_wake_ms"] for _ in range(options.repeats)]
    figures: dict = {"kv_gb": options.kv_gb, "sleep_level": level, "between_s": options.between, "at_once_ms": statistics.median(at_once)}
    for name in turns[0]:
        figures[name] = statistics.median(each[name] for each in turns)
    if mesh.rank == 0:
        alone.report("sleep", options, figures)
    rollout.close()
    mesh.close()


def tokens_of(options) -> int:
    """That fill the cache."""
    from megaflow.config.loading import load
    from megaflow.rollout.engine_args import kv_bytes_per_token
    from megaflow.shape import read_shape

    cfg = load(None, [f"model.path={options.folder}", *options.overrides]).config
    return int(options.kv_gb * 1e9) // kv_bytes_per_token(cfg, read_shape(options.folder))


def turn(rollout, level: int, between_s: float) -> dict[str, float]:
    """Milliseconds of each part; 1e9 bytes in use on the device, awake and asleep."""
    found = {"device_gb_awake": alone.device_gb()}
    found["sleep_ms"] = milliseconds(lambda: rollout.sleep(level))
    found["device_gb_asleep"] = alone.device_gb()
    found["engine_gb_asleep"] = held.engine_gb()
    time.sleep(between_s)
    found["wake_weights_ms"] = milliseconds(lambda: rollout.wake(("weights",)))
    found["wake_kv_cache_ms"] = milliseconds(lambda: rollout.wake(("kv_cache",)))
    found["sleep_and_wake_ms"] = found["sleep_ms"] + found["wake_weights_ms"] + found["wake_kv_cache_ms"]
    return found


def milliseconds(action) -> float:
    start = time.perf_counter()
    action()
    return (time.perf_counter() - start) * 1e3


if __name__ == "__main__":  # the engine's processes import this file
    main()
