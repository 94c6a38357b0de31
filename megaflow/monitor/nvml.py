"""Utilisation, power and energy of this rank's GPU by NVML (nvidia-ml-py), looked at in a thread and attributed to the open phase."""

from __future__ import annotations

import importlib
import os
import threading
import time
from collections import defaultdict
from collections.abc import Callable
from typing import Any

INTERVAL_S = 0.1
UTILISATION, POWER = "device/util_<phase>", "device/power_w_<phase>"  # metrics, of each phase
FEWEST_SAMPLES = 5  # a shorter phase is not reported: NVML's own utilisation is a mean over up to a second


class DeviceSampler:
    """`enter(phase)` at each change of phase, `drain()` once a step, `close()` at the end.

    engine_bytes: the most that processes other than this one held on the device, by phase; own_bytes: what this one held when last looked
    at. Empty and None where NVML does not tell processes apart (in some containers).
    """

    def __init__(self, nvml: Any, handle: Any, interval_s: float = INTERVAL_S, clock: Callable[[], float] = time.monotonic):
        self._nvml, self._handle, self._interval_s, self._clock = nvml, handle, interval_s, clock
        self._lock = threading.Lock()
        self._phase = ""
        self._utilisation: dict[str, list[float]] = defaultdict(list)
        self._power_w: dict[str, list[float]] = defaultdict(list)
        self.engine_bytes: dict[str, int] = {}
        self.own_bytes: int | None = None
        self._energy_mark = self._energy_j()
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._live, name="nvml", daemon=True)

    def start(self) -> DeviceSampler:
        self._thread.start()
        return self

    def _live(self) -> None:
        while not self._end.wait(self._interval_s):
            self.sample()

    def sample(self) -> None:
        """One look."""
        utilisation = float(self._nvml.nvmlDeviceGetUtilizationRates(self._handle).gpu)
        power = self._nvml.nvmlDeviceGetPowerUsage(self._handle) / 1e3  # it tells milliwatts
        with self._lock:
            self._utilisation[self._phase].append(utilisation)
            self._power_w[self._phase].append(power)
        self.sample_memory()

    def sample_memory(self) -> None:
        """One look at who holds what; at the end of a phase too, which may be shorter than the time between two looks."""
        try:
            by_pid = {p.pid: p.usedGpuMemory for p in self._nvml.nvmlDeviceGetComputeRunningProcesses(self._handle)}
        except self._nvml.NVMLError:
            return
        mine = by_pid.pop(os.getpid(), None)
        if mine is None or any(used is None for used in by_pid.values()):
            return
        with self._lock:
            self.own_bytes = mine
            self.engine_bytes[self._phase] = max(self.engine_bytes.get(self._phase, 0), sum(by_pid.values()))

    def _energy_j(self) -> float | None:
        try:
            return self._nvml.nvmlDeviceGetTotalEnergyConsumption(self._handle) / 1e3  # since the driver was loaded, in millijoules
        except self._nvml.NVMLError:
            return None

    def enter(self, phase: str) -> None:
        """What is seen from now on belongs to `phase`; "" to none."""
        with self._lock:
            self._phase = phase

    def drain(self) -> dict[str, float]:
        """device/util_<phase> (percent) and device/power_w_<phase>, means; device/energy_j since the last call. Starts over."""
        with self._lock:
            utilisation, self._utilisation = self._utilisation, defaultdict(list)
            power, self._power_w = self._power_w, defaultdict(list)
            self.engine_bytes = {}
        found = {}
        for phase, seen in utilisation.items():
            if phase and len(seen) >= FEWEST_SAMPLES:
                found[UTILISATION.replace("<phase>", phase)] = sum(seen) / len(seen)
                found[POWER.replace("<phase>", phase)] = sum(power[phase]) / len(power[phase])
        now = self._energy_j()
        if now is not None and self._energy_mark is not None:
            found["device/energy_j"] = now - self._energy_mark
        self._energy_mark = now
        return found

    def close(self) -> None:
        self._end.set()
        if self._thread.is_alive():
            self._thread.join()


def open_sampler(uuid: str, nvml: Any = None) -> tuple[DeviceSampler | None, str]:
    """(sampler of the GPU with this UUID, not started, and "") or (None, why not)."""
    if nvml is None:
        try:
            nvml = importlib.import_module("pynvml")
        except ImportError:
            return None, "the package nvidia-ml-py is not installed"
    try:
        nvml.nvmlInit()
        handle = nvml.nvmlDeviceGetHandleByUUID(uuid)
        sampler = DeviceSampler(nvml, handle)
        sampler.sample()
    except nvml.NVMLError as e:
        return None, f"NVML: {e}"
    sampler.drain()
    return sampler, ""


class UtilisationWatch:
    """Says once for each phase that the GPU was idle for much of it, over several steps."""

    LOWEST = 80.0  # percent
    STEPS = 5

    def __init__(self) -> None:
        self._seen: dict[str, list[float]] = defaultdict(list)
        self._told: set[str] = set()

    def look(self, metrics: dict[str, float]) -> list[str]:
        """One step's metrics; returns what there is to say."""
        texts = []
        for phase, hint in HINTS.items():
            value = metrics.get(UTILISATION.replace("<phase>", phase))
            if value is None or phase in self._told:
                continue
            last = self._seen[phase] = [*self._seen[phase], value][-self.STEPS :]
            mean = sum(last) / len(last)
            if len(last) == self.STEPS and mean < self.LOWEST:
                self._told.add(phase)
                seconds = metrics.get(f"time/{phase}", 0.0)
                told = f"the GPU was busy for {mean:.0f}% of the phase {phase} (mean of {self.STEPS} steps; {seconds:.1f} s of the last)"
                texts.append(f"{told}; {hint}")
        return texts


HINTS = {
    "rollout": "more samples at once fill it: rollout.prompts_per_step, rollout.samples_per_prompt, rollout.max_running",
    "logprob": "larger packs fill it: actor.micro_batch_tokens",
    "update": "larger packs fill it: actor.micro_batch_tokens",
}
