"""What is done again after the loss of an engine, how often, and how ranks agree on it. The engines themselves: dist/test_rollout.py."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from megaflow.parallel import comm
from megaflow.rollout import restarts as module
from megaflow.rollout.base import EngineLost
from megaflow.rollout.restarts import Finished, Restarts
from megaflow.types import LostError

MESH = SimpleNamespace(on_rank0=lambda fn: fn())


def losing(times: int):
    """Raises EngineLost so many times, then gives its number of calls."""
    calls = []

    def verb() -> int:
        calls.append(1)
        if len(calls) <= times:
            raise EngineLost(f"engine 0 died, {len(calls)}")
        return len(calls)

    return verb


def test_the_verb_is_called_again_after_each_loss_and_so_is_the_mending_itself() -> None:
    mended = losing(1)
    restarts = Restarts(MESH, limit=5)
    assert restarts.again(losing(2), mended) == 3
    assert mended() == 4, "failed once, then worked for the first loss, then for the second"
    stats = restarts.drain()
    assert stats["rollout/engine_restarts"] == 3 and stats["rollout/restart_s"] >= 0
    assert restarts.drain() == {}


def test_past_the_limit_within_an_hour_the_run_ends(monkeypatch) -> None:
    clock = [0.0]
    monkeypatch.setattr(module.time, "monotonic", lambda: clock[0])
    restarts = Restarts(MESH, limit=2)
    assert restarts.again(losing(2), lambda: None) == 3
    clock[0] = 3599.0
    with pytest.raises(LostError, match=r"engine 0 died, 1\. Engines were started anew 2 times within an hour \(rollout.max_restarts\)"):
        restarts.again(losing(1), lambda: None)
    clock[0] = 3601.0 + 3599.0
    assert restarts.again(losing(2), lambda: None) == 3, "an hour later it may again"
    with pytest.raises(LostError):
        Restarts(MESH, limit=0).again(losing(1), lambda: None)


def test_other_errors_are_not_mended() -> None:
    def refused() -> None:
        raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        Restarts(MESH, 3).again(refused, pytest.fail)


def test_finished_samples_are_kept_for_the_same_call_only() -> None:
    finished = Finished()
    finished.of_call(["a"], "sampling", (0, 1), 4, 7)[0, 2] = "sample"
    assert finished.of_call(["a"], "sampling", (0, 1), 4, 7) == {(0, 2): "sample"}
    assert finished.of_call(["a"], "sampling", (0, 1), 4, 8) == {}, "of another version"
    finished.of_call(["a"], "sampling", (0, 1), 4, 8)[0, 0] = "sample"
    finished.clear()
    assert finished.of_call(["a"], "sampling", (0, 1), 4, 8) == {}


@pytest.mark.parametrize("mine", [EngineLost("engine 0 died"), None, ValueError("of rank 0")])
@pytest.mark.parametrize("theirs", [EngineLost("engine 1 died"), None, ValueError("of rank 1")])
def test_ranks_mend_only_when_nothing_else_is_wrong_on_any_of_them(monkeypatch, mine, theirs) -> None:
    monkeypatch.setattr(comm.dist, "all_reduce", lambda flag, *_, **__: flag.fill_(mine is not None or theirs is not None))
    monkeypatch.setattr(comm.dist, "get_rank", lambda group: 0)
    monkeypatch.setattr(comm, "all_gather", lambda group, value: [value, None if theirs is None else comm.portable(theirs, 1)])
    if mine is None and theirs is None:
        comm.all_ok(None, None)
        return
    with pytest.raises(Exception) as found:
        comm.all_ok(None, mine)
    is_final = ValueError in (type(mine), type(theirs))
    assert isinstance(found.value, EngineLost) is not is_final
    if isinstance(theirs, ValueError) and not isinstance(mine, ValueError):
        assert "rank 1: ValueError: of rank 1" in str(found.value)
