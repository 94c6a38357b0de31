"""Who holds this rank's GPU, by NVML; 1e9 bytes, 0 where it does not tell processes apart."""

from __future__ import annotations

from megaflow.monitor.memory import GB


def engine_gb() -> float:
    """What other processes hold: the engine, on a machine without others."""
    return looked()[1]


def outside_gb() -> float:
    """What this process holds beside torch's allocator: CUDA's context, kernels, NCCL."""
    import torch

    own = looked()[0]
    return max(0.0, own - torch.cuda.memory_reserved() / GB) if own else 0.0


def looked() -> tuple[float, float]:
    """(this process, others)."""
    from megaflow.monitor.nvml import open_sampler
    from megaflow.parallel import device

    sampler = open_sampler(device.uuid())[0] if device.on_cuda() else None
    if sampler is None:
        return 0.0, 0.0
    sampler.sample_memory()
    return (sampler.own_bytes or 0) / GB, sampler.engine_bytes.get("", 0) / GB
