"""Windows and boards between two real processes: what a reader sees, when, and what it says when something is wrong."""

from __future__ import annotations

import json
import subprocess
import sys
import threading

import numpy as np
import pytest
import torch

from megaflow.parallel import cuda_ipc
from megaflow.parallel.board import Board
from megaflow.parallel.pieces import ZEROS, Piece, Reading, Target
from megaflow.parallel.shared_memory import ChannelError, nothing
from megaflow.parallel.window import OpenWindow, Window
from megaflow.rollout.engine_pull import Puller
from megaflow.types import PreflightError
from tests.ranks import ROOT, clean_env

READER = """
import json, sys, torch
from megaflow.parallel.board import Board
from megaflow.parallel.regions import Regions
from megaflow.parallel.window import OpenWindow
board = Board.attach(json.loads(sys.argv[1]))
window = None
for load in (1, 2):
    epoch = board.await_offer(load, 60.0)
    window = window or OpenWindow(json.loads(board.read("window")))
    b = Regions.of([(window.address("b"), 0, 1, 40)]).view(0).view(torch.float32)
    board.done(load, torch.tensor([int(b.sum()), epoch]), 1.5, 0.25)
"""


def parameters() -> dict[str, torch.Tensor]:
    return {"a": torch.arange(7.0), "b": torch.ones(1, 10), "c": torch.arange(12.0, dtype=torch.bfloat16).view(3, 4)}


def test_a_reader_sees_the_values_of_the_load_that_it_waits_for():
    window, board = Window(parameters()), Board.create(num_digests=2)
    reader = subprocess.Popen([sys.executable, "-c", READER, json.dumps(board.notice)], cwd=ROOT, env=clean_env())
    for load, value in ((1, 3.0), (2, 5.0)):
        window.parameters["b"].fill_(value)
        if window.refresh():
            board.write("window", json.dumps(window.descriptor()))
        board.offer(load, window.epoch)
        board.await_done(load, nothing, 60.0, "the reader")
        assert board.digests.tolist() == [int(10 * value), 1], "one epoch: on the host the window never moves"
        assert board.milliseconds == (1.5, 0.25)
    assert reader.wait(timeout=60) == 0


def test_a_closed_window_is_unmapped():
    window = Window(parameters())
    window.refresh()
    opened = OpenWindow(window.descriptor())
    assert mappings() == 2, "the rank's own and the reader's"
    opened.close()
    assert mappings() == 1


def mappings() -> int:
    with open("/proc/self/maps") as maps:
        return sum("megaflow-window" in line for line in maps)


def puller(parameters: dict[str, torch.Tensor], reading: Reading, timeout_s: float = 60.0) -> tuple[Board, Puller, Window]:
    window, board = Window(parameters), Board.create(len(reading.pieces))
    board.write("plan", json.dumps({"reading": reading.to_json(), "boards": {0: board.notice}, "timeout_s": timeout_s}))
    return board, Puller(board.notice), window


# target t [4, 6] float32: columns 2 to 5 of rows 0 to 2 from `a` [3, 4], the first two columns zeros, row 3 from `b` [6]
READING = Reading(
    reader=0,
    targets=[Target("t", (4, 6), "float32")],
    pieces=[
        Piece(0, 0, "a", 0, 0, 16, 8, 24, 3, 16),
        Piece(ZEROS, 0, "", 0, 0, 0, 0, 24, 3, 8),
        Piece(0, 0, "b", 0, 0, 24, 72, 24, 1, 24),
    ],
)


@pytest.mark.parametrize("keep", [True, False])
def test_a_puller_fills_its_targets_at_each_load_and_where_they_have_moved(keep):
    sources = {"a": torch.randn(3, 4), "b": torch.randn(6)}
    board, pull, window = puller(sources, READING)
    for load in (1, 2, 3):
        sources["a"].add_(1)
        if window.refresh():
            board.write("window", json.dumps(window.descriptor()))
        board.offer(load, window.epoch)
        target = torch.full((4, 6), 9.0)  # another tensor each time, as after a sleep
        pull.load({"t": target}, load, proof=True, flip=-1, keep=keep)
        board.await_done(load, nothing, 1.0, "nobody")
        expected = torch.cat([torch.cat([torch.zeros(3, 2), sources["a"]], 1), sources["b"][None]])
        assert torch.equal(target, expected)
        assert int(board.digests[1]) == 0, "padding"
    kept = board.digests.clone()
    pull.load({"t": target}, 3, proof=True, flip=0, keep=keep)
    assert (board.digests != kept).tolist() == [True, False, False], "the flipped piece and no other"


@pytest.mark.parametrize(
    ("targets", "message"),
    [
        ({}, "the engine has no parameter t"),
        ({"t": torch.zeros(4, 5)}, r"the engine stores \[4, 5\] torch.float32, the trainer sends \[4, 6\] torch.float32"),
        ({"t": torch.zeros(4, 6, dtype=torch.bfloat16)}, r"torch.bfloat16, the trainer sends"),
        ({"t": torch.zeros(6, 4).T}, "strides"),
    ],
)
def test_the_readers_error_reaches_the_rank(targets, message):
    board, pull, window = puller({"a": torch.randn(3, 4), "b": torch.randn(6)}, READING)
    window.refresh()
    board.write("window", json.dumps(window.descriptor()))
    board.offer(1, 1)
    failed = []

    def load():
        with pytest.raises((KeyError, ValueError)) as error:
            pull.load(targets, 1, proof=True, flip=-1, keep=True)
        failed.append(error)

    thread = threading.Thread(target=load)
    thread.start()
    with pytest.raises(ChannelError, match=message):
        board.await_done(1, nothing, 30.0, "the reader")
    thread.join()
    assert failed


def test_silence_ends_with_the_time_limit_and_a_dead_engine_at_once():
    board = Board.create(1)
    board.offer(1, 1)
    with pytest.raises(ChannelError, match="waited 0 s for engine 3 to read its weights"):
        board.await_done(1, nothing, 0.2, "engine 3")

    def gone():
        raise ChannelError("engine 3 died")

    with pytest.raises(ChannelError, match="engine 3 died"):
        board.await_done(1, gone, 60.0, "engine 3")


def test_a_rank_that_is_gone_is_noticed():
    code = "import json\nfrom megaflow.parallel.board import Board\nprint(json.dumps(Board.create(1).notice), flush=True)\ninput()"
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    rank = subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, env=clean_env(), **pipes)
    board = Board.attach(json.loads(rank.stdout.readline()))
    rank.kill()
    rank.wait()
    with pytest.raises(ChannelError, match="is gone"):
        board.await_offer(1, 60.0)


@pytest.mark.parametrize("variable", ["PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"])
def test_expandable_segments_are_refused_with_what_to_change(variable, monkeypatch):
    monkeypatch.setenv(variable, "max_split_size_mb:64, expandable_segments:True")
    with pytest.raises(PreflightError, match=f"{variable}=.*sync.transport=buckets"):
        cuda_ipc.refuse_expandable_segments()
    monkeypatch.setenv(variable, "expandable_segments:False")
    cuda_ipc.refuse_expandable_segments()


def test_parameters_lie_aligned_in_the_windows_copy():
    descriptor = Window(parameters()).descriptor()
    assert np.all(np.array([offset for _, offset in descriptor["places"].values()]) % 256 == 0)


def test_what_came_just_before_the_check_counts():
    """The engine's answer follows its last word; a rank that was not running for a moment sees both at once."""
    board = Board.create(1)

    def done_and_answered():
        board.done(1, None, 0.0, 0.0)
        raise ChannelError("the engine ended the load")

    board.await_done(1, done_and_answered, 60.0, "engine 3")
