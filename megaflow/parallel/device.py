"""The one place that knows whether there is a GPU: device, back end of collectives, random states, memory."""

from __future__ import annotations

import os
import random
from typing import Any

import numpy as np
import torch


def on_cuda() -> bool:
    return torch.version.cuda is not None and torch.cuda.is_available() and torch.cuda.device_count() > 0


def local_rank() -> int:
    return int(os.environ.get("LOCAL_RANK", 0))


def device() -> torch.device:
    return torch.device("cuda", local_rank() % torch.cuda.device_count()) if on_cuda() else torch.device("cpu")


def select_device() -> None:
    """Bind this process to its GPU; on CPU take the threads that OMP_NUM_THREADS grants."""
    if on_cuda():
        torch.cuda.set_device(device())
    else:
        torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))


def collective_backend() -> str:
    return "cpu:gloo,cuda:nccl" if on_cuda() else "gloo"


def synchronize() -> None:
    if on_cuda():
        torch.cuda.synchronize()


def total_bytes() -> int:
    """Memory of this rank's GPU; 0 without one."""
    return torch.cuda.get_device_properties(device()).total_memory if on_cuda() else 0


def uuid() -> str:
    """Of this rank's GPU, as NVML names it: "GPU-..."."""
    return f"GPU-{str(torch.cuda.get_device_properties(device()).uuid).removeprefix('GPU-')}"


def release_cached_memory() -> None:
    """Give memory that the allocator caches back to the device, so that the engine can have it."""
    if on_cuda():
        torch.cuda.empty_cache()


def make_deterministic() -> None:
    """Bitwise repeatable kernels; the cuBLAS workspace must be fixed before the first matrix product."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True, warn_only=True)


def seed_everything(seed: int) -> None:
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)


def rng_state() -> dict[str, Any]:
    """The random state of every library that this process uses."""
    state: dict[str, Any] = {"python": random.getstate(), "numpy": np.random.get_state(), "torch": torch.get_rng_state()}
    if on_cuda():
        state["cuda"] = torch.cuda.get_rng_state()
    return state


def set_rng_state(state: dict[str, Any]) -> None:
    random.setstate(state["python"])
    np.random.set_state(state["numpy"])
    torch.set_rng_state(state["torch"])
    if on_cuda() and "cuda" in state:
        torch.cuda.set_rng_state(state["cuda"])
