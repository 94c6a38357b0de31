"""Memory of this rank: the device's on CUDA, the process's resident set on CPU. Units: 1e9 bytes."""

from __future__ import annotations

from typing import Any

import psutil

GB = 1e9


class CudaProbe:
    """What the allocator and the device say, bytes."""

    has_device = True

    def current(self) -> int:
        import torch

        return torch.cuda.memory_allocated()

    def peak(self) -> int:
        """Since `restart`."""
        import torch

        return torch.cuda.max_memory_allocated()

    def restart(self) -> None:
        import torch

        torch.cuda.reset_peak_memory_stats()

    def reserved(self) -> int:
        """What the allocator holds of the device, used or cached."""
        import torch

        return torch.cuda.memory_reserved()

    def device_used(self) -> int:
        """By all processes."""
        import torch

        free, total = torch.cuda.mem_get_info()
        return total - free


class HostProbe:
    """The resident set. It has no peak that can be reset: the largest of what was seen stands for it, so a short peak goes unseen."""

    has_device = False

    def __init__(self) -> None:
        self._process = psutil.Process()
        self._peak = 0

    def current(self) -> int:
        now = self._process.memory_info().rss
        self._peak = max(self._peak, now)
        return now

    def peak(self) -> int:
        self.current()
        return self._peak

    def restart(self) -> None:
        self._peak = 0


class MemoryMeter:
    """Most memory between two `drain()` calls, in all and within each phase."""

    def __init__(self, on_cuda: bool, probe: Any = None):
        self._probe = probe or (CudaProbe() if on_cuda else HostProbe())
        self._peak = 0  # of what lies before the probe's last restart
        self._phases: dict[str, float] = {}

    def current_gb(self) -> float:
        return self._probe.current() / GB

    def sample(self) -> float:
        """Look now; returns the current figure."""
        return self.current_gb()

    def peak_gb(self) -> float:
        return max(self._peak, self._probe.peak()) / GB

    def begin(self) -> None:
        """A phase begins: its peak is its own."""
        self._peak = max(self._peak, self._probe.peak())
        self._probe.restart()

    def end(self, phase: str, engine_bytes: int | None = None, own_bytes: int | None = None) -> None:
        """A phase ends. engine_bytes: the most that the engine held in it, if known; else what the device lacks at the end and is not ours,
        which includes this process's CUDA context. own_bytes: what this process holds now, the context included, if known."""
        probe = self._probe
        self._note(f"mem/{phase}/actor_gb", probe.peak())
        self.begin()
        if not probe.has_device:
            return
        used, reserved = probe.device_used(), probe.reserved()
        self._phases[f"mem/{phase}/device_gb"] = used / GB
        self._phases[f"mem/{phase}/reserved_gb"] = reserved / GB
        self._note(f"mem/{phase}/engine_gb", used - reserved if engine_bytes is None else engine_bytes)
        if own_bytes is not None:
            self._phases[f"mem/{phase}/outside_gb"] = (own_bytes - reserved) / GB

    def _note(self, name: str, value: int) -> None:
        self._phases[name] = max(self._phases.get(name, 0.0), value / GB)

    def drain(self) -> dict[str, float]:
        """{"mem/peak_gb": ..., "mem/<phase>/actor_gb": ..., ...} since the last call; starts over."""
        found = {"mem/peak_gb": self.peak_gb(), **self._phases}
        self._peak, self._phases = 0, {}
        self._probe.restart()
        return found
