"""What the start of a scheduler spends its time on. Runs in SGLang's processes (rollout/sglang_plugin.py)."""

from __future__ import annotations

import os
import time
from typing import Any

SECONDS = "megaflow_seconds"  # key in the scheduler's answer to its parent
RUNNER = "sglang.srt.model_executor.model_runner.ModelRunner"
PARTS = {
    "process": "init_torch_distributed",
    "weights": "load_model",
    "kv_cache": "init_memory_pool",
    "decode_graphs": "init_decode_cuda_graph",
    "prefill_graphs": "init_prefill_cuda_graph",
}
_seconds: dict[str, float] = {}


def register() -> None:
    """Hooks around the parts, and one that hands the figures to the parent with the scheduler's first message."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    for part, method in PARTS.items():
        HookRegistry.register(f"{RUNNER}.{method}", _timed(part), HookType.AROUND)
    HookRegistry.register("sglang.srt.managers.scheduler.Scheduler.get_init_info", _hand_over, HookType.AFTER)


def _timed(part: str):
    def around(original, *args: Any, **kwargs: Any) -> Any:
        if part == "process":
            _seconds["scheduler_imports"] = time.time() - _started()
        start = time.perf_counter()
        try:
            return original(*args, **kwargs)
        finally:
            _seconds[part] = _seconds.get(part, 0.0) + time.perf_counter() - start

    return around


def _started() -> float:
    """When this process began, unix time."""
    import psutil

    return psutil.Process(os.getpid()).create_time()


def _hand_over(result: dict[str, Any], *args: Any, **kwargs: Any) -> dict[str, Any]:
    return {**result, SECONDS: {name: round(value, 3) for name, value in _seconds.items()}}
