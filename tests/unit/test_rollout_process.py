"""An engine's host process that is late, dies, or loses its rank. SGLang never gets to start here."""

from __future__ import annotations

import dataclasses
import os
import signal
import subprocess
import sys
import time
from concurrent.futures import Future
from pathlib import Path

import pytest

from megaflow.rollout.base import EngineError, EngineLost
from megaflow.rollout.engine_process import EngineProcess
from tests import tiny
from tests.ranks import ROOT, clean_env


def start(path: Path, **rollout) -> EngineProcess:
    (path / "config.json").write_text('{"architectures": ["Qwen2ForCausalLM"]}')
    config = tiny.config(str(path))
    config = dataclasses.replace(config, rollout=dataclasses.replace(config.rollout, **rollout))
    return EngineProcess(config, 0, "engine 0")


def test_a_start_that_takes_too_long_is_given_up(tmp_path):
    engine = start(tmp_path, start_timeout_s=0.01)
    with pytest.raises(EngineError, match=r"no answer within 0 s \(rollout.start_timeout_s\)"):
        engine.await_start()
    engine.close()
    assert engine.host.poll() is not None


def test_a_host_that_is_killed_is_named_at_once_and_whatever_is_asked_of_it_later_fails_too(tmp_path):
    engine = start(tmp_path)
    os.kill(engine.host.pid, signal.SIGKILL)
    began = time.monotonic()
    with pytest.raises(EngineError, match="host process .* exit code -9"):
        engine.await_start()
    assert time.monotonic() - began < 20
    for ask in (lambda: engine.call("release", ["kv_cache"]), lambda: next(engine.generate([([1], {})], 5.0))):
        with pytest.raises(EngineError, match="engine 0: its host process .* exit code -9"):
            ask()
    engine.close()


def test_answers_that_have_come_are_handed_out_before_the_error():
    """So that they need not be made again."""
    engine = EngineProcess.__new__(EngineProcess)  # no process behind it
    engine.name, engine._answers = "engine 0", {}

    def call(method, requests, answers):
        for message in ((0, 0.5), (1, 0.25), None):
            answers.put(message)
        lost = Future()
        lost.set_exception(EngineLost("engine 0: gone"))
        return lost

    engine.call = call
    stream = engine._answers_to("score", ["a", "b", "c"], 5.0)
    assert next(stream) == [(0, 0.5), (1, 0.25)]
    with pytest.raises(EngineLost, match="gone"):
        next(stream)


PROGRAM = """
import os, signal, sys
from pathlib import Path
from tests.unit.test_rollout_process import start
print(start(Path(sys.argv[1])).host.pid, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_nothing_is_left_of_an_engine_whose_rank_is_killed(tmp_path):
    command = [sys.executable, "-c", PROGRAM, str(tmp_path)]
    done = subprocess.run(command, env=clean_env(), cwd=ROOT, capture_output=True, text=True, timeout=100)
    assert done.returncode == -signal.SIGKILL, done.stderr
    pid = int(done.stdout)
    deadline = time.monotonic() + 30
    while is_running(pid) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not is_running(pid)


def is_running(pid: int) -> bool:
    """A process that has ended but was not waited for does not count."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False
