"""Memory of this rank: the device's on CUDA, the process's resident set on CPU. Units: 1e9 bytes."""

from __future__ import annotations

import psutil

GB = 1e9


class MemoryMeter:
    """Peak between two `drain()` calls.

    On CUDA the peak is the allocator's own (every allocation counts, the engine's process does not). A resident set has no peak that
    can be reset, so on CPU it is the largest of what `sample()` saw, at phase ends: a shorter peak within a phase goes unseen.
    """

    def __init__(self, on_cuda: bool):
        self._on_cuda = on_cuda
        self._process = psutil.Process()
        self._peak = 0.0

    def current_gb(self) -> float:
        if self._on_cuda:
            import torch

            return torch.cuda.memory_allocated() / GB
        return self._process.memory_info().rss / GB

    def sample(self) -> float:
        """Look now; returns the current figure."""
        current = self.current_gb()
        self._peak = max(self._peak, current)
        return current

    def peak_gb(self) -> float:
        if self._on_cuda:
            import torch

            return torch.cuda.max_memory_allocated() / GB
        return max(self._peak, self.current_gb())

    def drain(self) -> dict[str, float]:
        """{"mem/peak_gb": ...} since the last call; starts over."""
        peak, self._peak = self.peak_gb(), 0.0
        if self._on_cuda:
            import torch

            torch.cuda.reset_peak_memory_stats()
        return {"mem/peak_gb": peak}
