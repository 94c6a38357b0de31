"""The line of a step, the times in it and the memory in it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from megaflow.monitor.console import Console, banner, duration
from megaflow.monitor.memory import MemoryMeter
from megaflow.monitor.timers import PhaseTimer

METRICS = {
    "reward/mean": 0.5125, "rollout/len_mean": 23.14, "rollout/truncated": 0.02, "train/kl": 0.00123, "train/clip_frac": 0.031,
    "train/grad_norm": 1.234, "time/step": 4.0, "time/sync": 0.31, "time/rollout": 2.04, "time/logprob": 0.4, "time/logic": 0.01,
    "time/update": 1.2, "perf/tokens_per_s": 12345.6, "mem/peak_gb": 2.34,
}  # fmt: skip


def test_line_says_everything_and_fits() -> None:
    line = Console(steps=100).line(12, METRICS)
    assert line == (
        "step  12/100 reward 0.512 len 23.1 trunc 2% kl 1.2e-03 clip 3.1% gnorm 1.2"
        " | sync 0.3 roll 2.0 logp 0.4 upd 1.2 = 4.0s | 12,346 tok/s 2.3 GB eta 5m52s"  # 88 steps of 4 s
    )
    assert len(line) <= 160


def test_missing_and_non_finite_metrics() -> None:
    line = Console(steps=9).line(3, {"reward/mean": 0.5, "train/grad_norm": float("nan"), "eval/addition/accuracy": 0.75})
    assert line == "step 3/9 reward 0.500 gnorm nan addition 0.750"


def test_eta_follows_the_recent_pace() -> None:
    console = Console(steps=50)
    for step in range(1, 21):
        console.line(step, {"time/step": 100.0})
    for step in range(21, 41):
        line = console.line(step, {"time/step": 2.0})
    assert line.endswith("eta 20s")  # 10 steps of 2 s: the slow start is forgotten


@pytest.mark.parametrize(("seconds", "text"), [(47.4, "47s"), (725, "12m05s"), (11220, "3h07m"), (187_200, "2d04h"), (59.7, "1m00s")])
def test_duration(seconds: float, text: str) -> None:
    assert duration(seconds) == text


def test_banner_says_where_and_from_where() -> None:
    text = banner("a", Path("runs/a"), 0, 10, {"ranks": "2"})
    assert text == "megaflow: run a starts, to step 10; everything it writes is in runs/a/\n  ranks: 2"
    assert "goes on after step 5" in banner("a", Path("runs/a"), 5, 10, {})


class Clock:
    """Passes only when told; `waits` counts device synchronisations."""

    def __init__(self) -> None:
        self.now, self.waits = 0.0, 0

    def __call__(self) -> float:
        return self.now

    def wait(self) -> None:
        self.waits += 1


def test_nested_phases_add_up_to_the_whole() -> None:
    clock = Clock()
    timer = PhaseTimer(clock.wait, clock)
    with timer.phase("update"):
        clock.now += 1.0
        with timer.phase("sync"):
            clock.now += 10.0
            with timer.phase("sync"):
                clock.now += 100.0
        clock.now += 2.0
    clock.now += 1000.0  # between phases: nobody's
    with timer.phase("update"):
        clock.now += 4.0
    assert timer.drain() == {"time/sync": 110.0, "time/update": 7.0}
    assert timer.drain() == {}
    assert clock.waits == 8  # before and after each of the four


def test_an_error_in_a_phase_closes_it() -> None:
    clock = Clock()
    timer = PhaseTimer(clock=clock)
    with pytest.raises(ValueError), timer.phase("rollout"):
        clock.now += 3.0
        raise ValueError
    clock.now += 5.0
    with timer.phase("sync"):
        clock.now += 1.0
    assert timer.drain() == {"time/rollout": 3.0, "time/sync": 1.0}


def test_memory_peak_on_cpu_is_what_samples_saw() -> None:
    meter = MemoryMeter(on_cuda=False)
    before = meter.sample()
    block = np.ones(25_000_000)  # 0.2e9 bytes, touched
    meter.sample()
    del block
    peak = meter.drain()["mem/peak_gb"]
    assert 0.19 < peak - before < 0.25
    assert meter.drain()["mem/peak_gb"] < peak - 0.15  # starts over
