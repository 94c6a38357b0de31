"""One checkpoint on its way at most, whole when every rank says so, and an error of any thread is everybody's."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from megaflow.checkpoint import saver as module
from megaflow.checkpoint.directory import Retention
from megaflow.checkpoint.saver import Saver
from megaflow.checkpoint.saving import Content, Saved
from megaflow.checkpoint.staging import HostMemory, exact
from megaflow.types import UserError


class Mesh:
    """This rank, and another one whose vote (is over, has failed) is `other`."""

    def __init__(self) -> None:
        self.other = (True, False)

    def all_gather(self, value: Any) -> list[Any]:
        return [value, self.other]


class Writing:
    """Writes until `go`."""

    made: list[Writing] = []

    def __init__(self, step: int, is_copied: bool):
        self.step, self.is_copied, self.go, self.error = step, is_copied, threading.Event(), None
        self.shards = type("Shards", (), {"num_written": 0})
        Writing.made.append(self)

    @classmethod
    def begin(cls, directory: Path, content: Content, mesh: Mesh, memory: HostMemory, is_copied: bool) -> Writing:
        return cls(content.step, is_copied)

    def write(self) -> None:
        assert self.go.wait(10)

    def complete(self, retention: Retention) -> Saved:
        if self.error is not None:
            raise self.error
        return Saved(self.step, Path(f"step_{self.step}"), 5, 0.5, None)


@pytest.fixture
def saver(monkeypatch: pytest.MonkeyPatch) -> Saver:
    monkeypatch.setattr(module, "Writing", Writing)
    Writing.made = []
    return Saver(Mesh(), Path("x"), Retention(1), in_background=True)


def end(writing: Writing) -> None:
    """As seen from the main thread."""
    writing.go.set()
    (thread,) = [t for t in threading.enumerate() if t.name == "checkpoint"]
    thread.join(10)


def test_it_is_whole_once_all_ranks_have_written(saver: Saver) -> None:
    assert saver.poll() == saver.settle() == []
    assert saver.save(Content(1, None, {})) == []
    (first,) = Writing.made
    assert first.is_copied and saver.poll() == [], "this rank writes"
    end(first)
    saver.mesh.other = (False, False)
    assert saver.poll() == [], "the other rank writes"
    saver.mesh.other = (True, False)
    assert [each.step for each in saver.poll()] == [1]
    assert saver.poll() == saver.settle() == []


def test_a_second_save_waits_for_the_first_and_says_how_long(saver: Saver) -> None:
    saver.save(Content(1, None, {}))
    assert saver.waited_s == 0
    threading.Timer(0.2, Writing.made[0].go.set).start()
    assert [each.step for each in saver.save(Content(2, None, {}))] == [1]
    assert 0.1 < saver.waited_s < 5
    end(Writing.made[1])
    assert [each.step for each in saver.settle()] == [2]


def test_a_failure_is_raised_though_the_other_rank_still_writes(saver: Saver) -> None:
    saver.save(Content(1, None, {}))
    Writing.made[0].error = UserError("the disk is full")
    assert saver.poll() == [], "not before this rank's thread has ended"
    end(Writing.made[0])
    saver.mesh.other = (False, False)
    with pytest.raises(UserError, match="the disk is full"):
        saver.poll()
    assert saver.poll() == [] and saver.save(Content(2, None, {})) == []
    end(Writing.made[1])


def test_a_failure_of_the_other_rank_is_seen_at_once(saver: Saver) -> None:
    saver.save(Content(1, None, {}))
    saver.mesh.other = (True, True)
    threading.Timer(0.1, Writing.made[0].go.set).start()
    assert [each.step for each in saver.poll()] == [1], "the vote of `complete`, which raises, is another one"


def test_host_memory_is_used_again_and_knows_what_lies_in_it() -> None:
    memory = HostMemory()
    tensors = [torch.arange(10), torch.randn(3, 5, dtype=torch.bfloat16), torch.tensor(2.5), torch.randn(4, 6).T]
    copies = memory.copy(tensors)
    for tensor, copy in zip(tensors, copies, strict=True):
        assert torch.equal(tensor, copy) and tensor.dtype == copy.dtype and memory.owns(copy) and not memory.owns(tensor)
    before = memory.nbytes
    memory.reset()
    again = memory.copy([t + 1 for t in tensors])
    assert memory.nbytes == before and again[0].data_ptr() == copies[0].data_ptr()
    large = memory.take(torch.empty(300 << 20, dtype=torch.uint8, device="meta"))
    assert large.nbytes == 300 << 20 and memory.nbytes == before + large.nbytes, "larger than a block: a block of its own, no larger"


def test_a_tensor_is_saved_without_what_lies_beside_it(tmp_path: Path) -> None:
    view = torch.arange(1000.0)[500:503]
    torch.save(view, tmp_path / "whole.pt")
    torch.save(exact(view), tmp_path / "exact.pt")
    assert torch.equal(torch.load(tmp_path / "exact.pt"), view) and exact(view).untyped_storage().nbytes() == 12
    assert (tmp_path / "exact.pt").stat().st_size < 2000 < (tmp_path / "whole.pt").stat().st_size
