"""What is measured around each phase of a step: seconds, memory, and on CUDA utilisation, power and the budgets."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from megaflow.config.schema import Config
from megaflow.monitor.memory import MemoryMeter
from megaflow.monitor.nvml import DeviceSampler, UtilisationWatch, open_sampler
from megaflow.monitor.timers import PhaseTimer
from megaflow.parallel import device
from megaflow.shape import read_shape
from megaflow.trainer.budget import BudgetWatch, phase_budgets


class Meters:
    """One rank's. `notice`: what a person should know of what is not measured."""

    def __init__(self, cfg: Config, mesh: Any):
        self.notice = ""
        self._timer = PhaseTimer(device.synchronize)
        self._memory = MemoryMeter(device.on_cuda())
        self._sampler: DeviceSampler | None = None
        self._budgets = BudgetWatch({})
        self._utilisation = UtilisationWatch()
        self._open: list[str] = []
        if mesh.rank == 0:  # rank 0's metrics count
            self._begin(cfg, mesh)

    def _begin(self, cfg: Config, mesh: Any) -> None:
        if not device.on_cuda():
            self.notice = "no NVIDIA GPU: utilisation, power and the engine's memory are not measured"
            return
        self._budgets = BudgetWatch(phase_budgets(cfg, read_shape(cfg.model.path), mesh.world_size, device.total_bytes()))
        self._sampler, why = open_sampler(device.uuid())
        self.notice = f"utilisation and power are not measured: {why}" if why else ""
        if self._sampler is not None:
            self._sampler.start()

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """time/<name>, mem/<name>/*, device/*_<name>. A phase within another one counts for itself only."""
        self._enter(name)
        self._memory.begin()
        try:
            with self._timer.phase(name):
                yield
        finally:
            self._leave(name)

    def _enter(self, name: str) -> None:
        self._open.append(name)
        if self._sampler is not None:
            self._sampler.enter(name)

    def _leave(self, name: str) -> None:
        self._open.pop()
        if self._sampler is None:
            self._memory.end(name)
            return
        self._sampler.sample_memory()
        self._memory.end(name, self._sampler.engine_bytes.get(name), self._sampler.own_bytes)
        self._sampler.enter(self._open[-1] if self._open else "")

    def memory_gb(self) -> float:
        """Memory of this rank now, 1e9 bytes."""
        return self._memory.sample()

    def drain(self) -> dict[str, float]:
        """All figures since the last call."""
        return self._timer.drain() | self._memory.drain() | (self._sampler.drain() if self._sampler is not None else {})

    def warnings(self, metrics: dict[str, float]) -> list[str]:
        """What is odd about a step, each said once."""
        return self._budgets.look(metrics) + self._utilisation.look(metrics)

    def close(self) -> None:
        if self._sampler is not None:
            self._sampler.close()
