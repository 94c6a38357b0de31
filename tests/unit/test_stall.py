"""What is said of a stall, from findings made by hand; how long a phase may take; the record that others read."""

from __future__ import annotations

import dataclasses
import math
import os
import signal
import subprocess
import sys
import time

import pytest

from megaflow.config.schema import Config, RolloutConfig, RunConfig, WatchdogConfig
from megaflow.monitor import stacks
from megaflow.monitor.limits import Limits
from megaflow.monitor.progress import Doing, Record
from megaflow.monitor.ranks import Place, Ranks, Sight
from megaflow.monitor.stall import Finding, conclusion, ranks_text, report, waits_for


def waiting(rank: int, group: str, ranks: list[int], seq: int, item: str, op: str = "nccl:all_reduce", phase: str = "update") -> Finding:
    entry = {"group": group, "op": op, "seq": seq, "size": [4], "ranks": ranks, "called": "data_parallel"}
    return Finding(rank, "node1", 100 + rank, 7, phase, item, 905.0, 900.0, True, [entry], {group: [seq, seq - 1]})


def working(rank: int, counts: dict[str, list[int]], place: str = "reward", **more) -> Finding:
    return Finding(rank, "node1", 100 + rank, 7, place, "reward 3 of 64", 901.0, 900.0, False, [], counts, **more)


def test_three_ranks_wait_for_one_in_another_phase() -> None:
    found = [waiting(r, "5", [0, 1, 2, 3], 812, "gradient reduction") for r in (0, 1, 3)]
    found.append(working(2, {"5": [811, 811]}, stack="  in my_reward"))
    assert waits_for(found) == {0: {2}, 1: {2}, 3: {2}, 2: set()}
    assert conclusion(found) == (
        "ranks 0-1,3 wait in all_reduce of ranks 0-3, data_parallel, number 812 (`update: gradient reduction`) for rank 2. "
        "Rank 2 works in `reward: reward 3 of 64`, for 901.0 s without progress"
    )
    text = report(found, "runs/x/stall-1")
    assert [line.split()[0] for line in text.splitlines()[2:7]] == ["rank", "0", "1", "2", "3"]
    assert "--- rank 2, reward: reward 3 of 64 ---\n  in my_reward" in text and "--- rank 0" not in text and "runs/x/stall-1/" in text


def test_two_groups_wait_for_one_rank_each_and_one_of_these_for_the_other() -> None:
    """A pipeline of two stages of two: 1 waits for 0 in its tensor-parallel group, 3 for 2 in its own, 2 for 0 between the stages."""
    found = [
        working(0, {"tp0": [40, 40], "pp": [8, 8]}),
        waiting(1, "tp0", [0, 1], 41, "micro-batch 2 of 4"),
        waiting(2, "pp", [0, 2], 9, "micro-batch 2 of 4"),
        waiting(3, "tp1", [2, 3], 41, "micro-batch 2 of 4"),
    ]
    found[2].counts["tp1"] = [40, 40]
    assert waits_for(found) == {0: set(), 1: {0}, 2: {0}, 3: {2}}
    assert "rank 3 waits in all_reduce of ranks 2-3" in conclusion(found) and "for rank 2. Rank 0 works in `reward" in conclusion(found)


def test_all_wait_in_one_collective_that_does_not_end() -> None:
    text = conclusion([waiting(r, "5", [0, 1], 9, "gradient reduction") for r in (0, 1)])
    assert text.startswith("every rank waits, the collective does not end: network, driver or device: ranks 0-1 wait in all_reduce")
    assert text.endswith("which all its ranks have begun")


def test_a_rank_with_a_collective_on_its_way_can_be_the_one_that_others_wait_for() -> None:
    """On a device collectives run beside the program: rank 1 has begun number 5 of a group as its ranks have, and is stuck elsewhere."""
    found = [waiting(0, "a", [0, 1], 6, "optimizer step"), waiting(1, "b", [1], 5, "optimizer step")]
    found[1].counts["a"] = [5, 5]
    assert "for rank 1. Rank 1 works in `update: optimizer step`" in conclusion(found)


def test_ranks_text() -> None:
    assert ranks_text([0]) == "0" and ranks_text([5, 0, 1, 2, 7, 6]) == "0-2,5-7"


def config(**watchdog) -> Config:
    rollout = RolloutConfig(timeout_s=100.0, start_timeout_s=50.0)
    return Config(run=RunConfig(timeout_s=1000.0), rollout=rollout, watchdog=WatchdogConfig(**watchdog))


def test_limits_leave_who_knows_more_to_speak_first_and_speak_before_collectives_do() -> None:
    limits = Limits(config(timeout_s=60.0, first_factor=2.0, phases={"save": 10.0, "eval": 0.0, "update": 5000.0}))
    assert limits.of_phase("logic", False) == 60.0 and limits.of_phase("logic", True) == 120.0
    assert limits.of_phase("rollout", False) == 100.0 + 50.0 + 30.0, "an engine is found to hang, and started anew"
    assert limits.of_phase("save", False) == 10.0 and limits.of_phase("eval", True) == math.inf
    assert limits.of_phase("update", True) == limits.longest_s == 10_000.0 < limits.backstop_s
    assert limits.collective_s == 900.0, "nine tenths of run.timeout_s"


def test_without_a_limit_only_named_phases_are_watched() -> None:
    limits = Limits(config(timeout_s=0.0, phases={"update": 5.0}))
    assert limits.of_phase("rollout", False) == math.inf and limits.of_phase("update", False) == 5.0


@dataclasses.dataclass
class Stub:
    """A rank as ranks.Peer shows it."""

    seen: Sight | None
    is_here: bool = True

    def sight(self, told) -> Sight | None:
        return self.seen


def sight(phase: str, age_s: float, waiting: bool, beat_s: float = 0.0) -> Sight:
    return Sight(Doing(9, 0, 3, phase, "", 0, 0, False), age_s, beat_s, waiting, {})


def wait(age_s: float, phase: str = "logic", beat_s: float = 0.0) -> Sight:
    return sight(phase, age_s, True, beat_s)


def work(age_s: float, phase: str = "logic", beat_s: float = 0.0) -> Sight:
    return sight(phase, age_s, False, beat_s)


def stalled(me: Sight, *others: Sight | None, is_here: bool = True) -> bool:
    """Limits: 60 s; save 10 s; a collective 900 s."""
    ranks = Ranks([Place.own(0)], 0, Limits(config(timeout_s=60.0, first_factor=1.0, phases={"save": 10.0, "eval": 0.0})), None)
    ranks.peers = {rank: Stub(each, is_here) for rank, each in enumerate(others, 1)}
    return ranks.are_stalled(me)


def test_who_has_stalled() -> None:
    assert not stalled(work(59)) and stalled(work(61)), "alone"
    assert stalled(work(61), work(1)) and not stalled(work(59), work(61)), "who works judges itself"
    assert not stalled(work(800, "eval")) and stalled(work(11, "save")), "each phase has its own limit"
    assert not stalled(wait(500), work(3)), "it waits for one that moves"
    assert not stalled(wait(61), work(20, "logic"), wait(61)) and stalled(wait(61), work(61), wait(61))
    assert stalled(wait(11, "save"), wait(61), wait(61)) and not stalled(wait(11, "save"), wait(59), wait(61)), "all wait for each other"
    assert stalled(wait(61), work(61), work(1)), "one is stuck, though another one moves"
    assert not stalled(wait(61), wait(61), work(1)), "two wait for the one that moves"
    assert stalled(wait(61), wait(61, beat_s=50), work(1)), "silent: what it last said of itself is old"
    assert not stalled(wait(61), wait(30, beat_s=29), work(1)), "a call that holds the GIL for half of its time"
    assert stalled(wait(901), work(3)) and not stalled(work(901, "eval"), wait(901)), "a collective would end by itself at 1000 s"
    assert stalled(wait(61), None) and not stalled(wait(61), None, work(1)), "nothing is known of it"
    assert not stalled(wait(61), work(11, "eval")) and stalled(wait(61), work(61, "eval", beat_s=60), is_here=False), "a host that is gone"


def test_a_record_is_read_through_the_process_that_made_it() -> None:
    record = Record(bytearray(8192))
    fd, token = record.publish()
    outer = record.enter("update", 3)
    record.mark("micro-batch", 2, 8)
    record.beat({"waiting": True})
    seen = Record.open_peer(os.getpid(), fd, token)
    doing, (beat_ns, facts) = seen.doing(), seen.last_beat()
    assert (doing.step, doing.phase, doing.text, doing.is_first, doing.marks) == (3, "update", "micro-batch 2 of 8", True, 3)
    assert facts == {"waiting": True} and doing.at_ns <= beat_ns <= time.monotonic_ns()
    record.leave(outer)
    record.enter("update", 4)
    assert not seen.doing().is_first and seen.doing().text == "" and seen.doing().age_s(seen.doing().at_ns + 10**9) == 1.0
    assert Record.open_peer(os.getpid(), fd, b"othertok") is None, "another process may have that number by now"


def test_a_mark_costs_less_than_a_few_microseconds() -> None:
    record = Record(bytearray(8192))
    record.publish()
    start = time.process_time()
    for i in range(10_000):
        record.mark("micro-batch", i, 10_000)
    assert (time.process_time() - start) / 10_000 < 1e-5, "0.4 us when it was measured"


CHILD = """
import time
from megaflow.monitor import stacks
def in_here(): time.sleep(60)
stacks.install()
print(1, flush=True)
in_here()
"""


@pytest.mark.parametrize("is_stopped", [False, True])
def test_stacks_of_another_process_also_of_a_stopped_one(is_stopped: bool) -> None:
    with subprocess.Popen([sys.executable, "-c", CHILD], stdout=subprocess.PIPE) as child:
        child.stdout.readline()
        time.sleep(0.1)
        if is_stopped:
            child.send_signal(signal.SIGSTOP)
            time.sleep(0.1)
        assert stacks.state(child.pid).startswith("T" if is_stopped else "S")
        text = stacks.of_process(child.pid, wake=is_stopped)
        assert "in in_here" in stacks.main_thread(text)
        assert "in in_here" in stacks.of_process(child.pid), "again, and still alive"
        child.kill()
    assert stacks.of_process(child.pid) == "" and stacks.state(child.pid) == "gone"


def test_who_is_not_prepared_gets_no_signal() -> None:
    with subprocess.Popen([sys.executable, "-c", "import time; print(1, flush=True); time.sleep(60)"], stdout=subprocess.PIPE) as child:
        child.stdout.readline()
        assert stacks.of_process(child.pid) == "" and child.poll() is None
        child.kill()


def test_finding_travels_as_json() -> None:
    found = waiting(1, "5", [0, 1], 9, "gradient reduction")
    assert Finding(**dataclasses.asdict(found)) == found
