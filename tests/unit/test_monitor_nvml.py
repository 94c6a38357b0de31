"""NVML's figures by phase, from a module that says what the test tells it to."""

from __future__ import annotations

import os
from types import SimpleNamespace

import pytest

from megaflow.monitor.nvml import DeviceSampler, UtilisationWatch, open_sampler


class FakeNvml:
    """One GPU. `processes`: pid -> bytes, None where the driver does not tell."""

    class NVMLError(Exception):
        pass

    def __init__(self, uuid: str = "GPU-1"):
        self.uuid, self.util, self.watts, self.joules = uuid, 0, 0.0, 0.0
        self.processes: dict[int, int | None] = {}
        self.has_energy = True

    def nvmlInit(self) -> None:
        pass

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> str:
        if uuid != self.uuid:
            raise self.NVMLError("Not Found")
        return uuid

    def nvmlDeviceGetUtilizationRates(self, handle) -> SimpleNamespace:
        return SimpleNamespace(gpu=self.util)

    def nvmlDeviceGetPowerUsage(self, handle) -> int:
        return int(self.watts * 1000)

    def nvmlDeviceGetTotalEnergyConsumption(self, handle) -> int:
        if not self.has_energy:
            raise self.NVMLError("Not Supported")
        return int(self.joules * 1000)

    def nvmlDeviceGetComputeRunningProcesses(self, handle) -> list[SimpleNamespace]:
        return [SimpleNamespace(pid=pid, usedGpuMemory=used) for pid, used in self.processes.items()]


def look(sampler: DeviceSampler, nvml: FakeNvml, phase: str, utils: list[int], watts: float) -> None:
    sampler.enter(phase)
    for util in utils:
        nvml.util, nvml.watts = util, watts
        sampler.sample()


def test_each_phase_gets_its_own_mean_and_the_step_its_energy():
    nvml = FakeNvml()
    sampler, why = open_sampler("GPU-1", nvml)
    assert sampler is not None and why == ""
    look(sampler, nvml, "rollout", [90, 100, 80, 90, 90], 500.0)
    look(sampler, nvml, "update", [60] * 6, 650.5)
    look(sampler, nvml, "sync", [5], 100.0)  # one look says nothing of a phase
    look(sampler, nvml, "", [0] * 9, 80.0)  # between the phases
    nvml.joules = 1234.5
    expected = {"device/util_rollout": 90, "device/power_w_rollout": 500, "device/util_update": 60, "device/power_w_update": 650.5}
    assert sampler.drain() == pytest.approx(expected | {"device/energy_j": 1234.5})
    nvml.joules = 1300.0
    assert sampler.drain() == pytest.approx({"device/energy_j": 65.5})


def test_the_engine_is_what_other_processes_hold_and_the_most_counts():
    nvml = FakeNvml()
    sampler, _ = open_sampler("GPU-1", nvml)
    nvml.processes = {os.getpid(): 10, 1: 70, 2: 5}
    look(sampler, nvml, "rollout", [1], 1.0)
    nvml.processes = {os.getpid(): 10, 1: 3}
    look(sampler, nvml, "rollout", [1], 1.0)
    look(sampler, nvml, "update", [1], 1.0)
    assert sampler.engine_bytes == {"rollout": 75, "update": 3} and sampler.own_bytes == 10


def test_a_phase_shorter_than_the_time_between_two_looks_is_seen_at_its_end():
    nvml = FakeNvml()
    sampler, _ = open_sampler("GPU-1", nvml)
    nvml.processes = {os.getpid(): 10, 1: 70}
    sampler.enter("reward")
    sampler.sample_memory()
    assert sampler.engine_bytes == {"reward": 70}


@pytest.mark.parametrize("processes", [{}, {99: 5}, {os.getpid(): 3, 99: None}])
def test_where_the_driver_hides_processes_nothing_is_said_of_the_engine(processes):
    nvml = FakeNvml()
    sampler, _ = open_sampler("GPU-1", nvml)
    nvml.processes = processes
    look(sampler, nvml, "rollout", [1], 1.0)
    assert sampler.engine_bytes == {} and sampler.own_bytes is None


def test_without_energy_counter_or_gpu():
    nvml = FakeNvml()
    nvml.has_energy = False
    sampler, _ = open_sampler("GPU-1", nvml)
    assert sampler.drain() == {}
    assert open_sampler("GPU-2", nvml) == (None, "NVML: Not Found")


def test_the_thread_looks_by_itself_and_ends():
    nvml = FakeNvml()
    nvml.util = 70
    sampler = DeviceSampler(nvml, "GPU-1", interval_s=0.001)
    sampler.enter("update")
    sampler.start()
    found: dict[str, float] = {}
    for _ in range(200):
        sampler._end.wait(0.01)
        found |= sampler.drain()
        if "device/util_update" in found:
            break
    sampler.close()
    assert found["device/util_update"] == 70 and not sampler._thread.is_alive()


def test_an_idle_gpu_is_told_once_and_only_after_several_steps():
    watch = UtilisationWatch()
    step = {"device/util_rollout": 50.0, "device/util_update": 95.0, "device/util_save": 3.0, "time/rollout": 2.0}
    told = [watch.look(step) for _ in range(10)]
    assert told[:4] == [[]] * 4 and told[5:] == [[]] * 5
    assert len(told[4]) == 1 and "busy for 50% of the phase rollout (mean of 5 steps; 2.0 s" in told[4][0]


def test_one_slow_step_is_not_told():
    watch = UtilisationWatch()
    assert [watch.look({"device/util_update": u}) for u in (95, 95, 20, 95, 95, 95, 95)] == [[]] * 7
