"""Memory by phase, compared with what the configuration allows."""

from __future__ import annotations

import pytest

from megaflow.config.schema import ActorConfig, Config, ModelConfig, ParallelConfig, RolloutConfig, SyncConfig
from megaflow.monitor.memory import MemoryMeter
from megaflow.shape import shape_of
from megaflow.trainer.budget import BudgetWatch, actor_bytes, phase_budgets
from megaflow.trainer.startup import Startup
from tests.unit.test_rollout_args import QWEN_1_5B


class FakeDevice:
    """A device of which `set` says what is held now; the peak is kept as CUDA's allocator does."""

    has_device = True

    def __init__(self):
        self.now = self.most = self.kept = self.used = 0

    def set(self, now: int, used: int = 0) -> None:
        self.now, self.most, self.kept, self.used = now, max(self.most, now), now, used

    def current(self) -> int:
        return self.now

    def peak(self) -> int:
        return self.most

    def restart(self) -> None:
        self.most = self.now

    def reserved(self) -> int:
        return self.kept

    def device_used(self) -> int:
        return self.used


def test_each_phase_has_its_own_peak_and_the_step_the_largest():
    gb, device = 10**9, FakeDevice()
    meter = MemoryMeter(True, device)
    device.set(3 * gb)
    meter.begin()
    device.set(9 * gb)
    device.set(4 * gb, used=50 * gb)
    meter.end("rollout")
    device.set(30 * gb)  # between the phases
    device.set(5 * gb)
    meter.begin()
    device.set(7 * gb, used=12 * gb)
    meter.end("update", engine_bytes=2 * gb, own_bytes=9 * gb)
    found = meter.drain()
    assert found["mem/rollout/actor_gb"] == 9 and found["mem/update/actor_gb"] == 7 and found["mem/peak_gb"] == 30
    assert found["mem/rollout/engine_gb"] == 46, "all that is used, less ours"
    assert found["mem/update/engine_gb"] == 2 and found["mem/update/outside_gb"] == 2, "NVML knew"
    assert found["mem/rollout/device_gb"] == 50 and found["mem/update/reserved_gb"] == 7
    assert meter.drain() == {"mem/peak_gb": 7}


def config(**actor) -> Config:
    return Config(model=ModelConfig("somewhere"), actor=ActorConfig(**actor), rollout=RolloutConfig(mem_fraction=0.5))


SHAPE = shape_of(QWEN_1_5B, "config.json")
N = 1.543714304  # its parameters, 1e9


def test_the_actors_bytes_by_hand():
    """bf16: 2 a parameter, gradients 4, main weights 4 and two moments 8, the last three split over data-parallel ranks."""
    held = actor_bytes(config(), SHAPE, 1)
    assert [held.parameters, held.gradients, held.optimizer] == pytest.approx([2e9 * N, 4e9 * N, 12e9 * N])
    assert actor_bytes(config(), SHAPE, 4).optimizer == pytest.approx(3e9 * N)
    assert actor_bytes(config(distributed_optimizer=False), SHAPE, 4).optimizer == pytest.approx(12e9 * N)
    fp32 = Config(model=ModelConfig("somewhere", dtype="float32"), parallel=ParallelConfig(tp=2))
    norms = 28 * 2 * 1536 + 1536  # whole on both ranks
    assert actor_bytes(fp32, SHAPE, 2).awake == pytest.approx((4 + 4 + 8) * (1e9 * N + norms) / 2)


def test_budgets_by_phase():
    """140 GB, an engine of half of it: 70, and 5 for what no formula has; 2 buckets of 256 MiB = 0.54; the actor's own rest 2."""
    budgets = phase_budgets(config(), SHAPE, 1, 140e9)
    assert budgets["rollout"].engine_gb == pytest.approx(75)
    assert budgets["rollout"].actor_gb == pytest.approx(14 * N + 0.537 + 2, abs=0.001)
    assert budgets["sync"].actor_gb == pytest.approx(18 * N + 0.537 + 2, abs=0.001)
    assert (budgets["update"].actor_gb, budgets["update"].engine_gb) == pytest.approx((135, 5))
    assert phase_budgets(config(offload="all"), SHAPE, 1, 140e9)["rollout"].actor_gb == pytest.approx(2.537, abs=0.001)
    small = Config(model=ModelConfig("somewhere"), sync=SyncConfig(bucket_mb=1))
    assert phase_budgets(small, SHAPE, 1, 140e9)["sync"].actor_gb == pytest.approx(18 * N + 2.002, abs=0.001)


def test_more_than_the_budget_is_told_once_with_the_numbers():
    watch = BudgetWatch(phase_budgets(config(), SHAPE, 1, 140e9))
    fine = {"mem/rollout/actor_gb": 24.0, "mem/rollout/engine_gb": 74.0, "mem/update/engine_gb": 4.0}
    assert watch.look(fine) == []
    over = {"mem/rollout/actor_gb": 40.0, "mem/update/engine_gb": 60.0}
    texts = watch.look(over)
    assert len(texts) == 2 and watch.look(over) == []
    assert "mem/rollout/actor_gb=40.0 GB is over the 24.1 GB" in texts[0] and "actor.offload" in texts[0]
    assert "mem/update/engine_gb=60.0 GB is over the 5.0 GB" in texts[1] and "rollout.mem_fraction" in texts[1]


class Engine:
    def __init__(self, **seconds: float):
        self.seconds = seconds

    def startup_seconds(self) -> dict[str, float]:
        return dict(self.seconds)


def test_the_start_is_told_by_part_and_to_the_first_token():
    startup = Startup()
    startup.process_began = startup.build_began - 8.0
    startup.parts["imports"] = 8.0
    with startup.part("actor"):
        pass
    startup.engine_started(Engine(total=20.0, weights=1.5, first_token=25.0))
    startup.engine_began = startup.build_began + 2.0
    facts = startup.facts()
    assert facts["first_token"] == pytest.approx(8 + 2 + 25, abs=0.01) and facts["engine"] == 20 and facts["engine_weights"] == 1.5
    assert set(startup.metrics()) == {"time/startup_imports", "time/startup_actor", "time/startup_engine", "time/startup_first_token"}
    assert startup.text().startswith("start-up: 35.0 s to the first token; imports 8.0") and "engine_weights 1.5" in startup.text()


def test_a_backend_without_an_engine_tells_only_what_it_has():
    startup = Startup()
    startup.engine_started(object())
    assert set(startup.metrics()) == {"time/startup_imports"}
