"""Scheduler processes that are started before their work is known."""

from __future__ import annotations

import json
import multiprocessing
import os
import sys
import types
from pathlib import Path

import pytest
import setproctitle

from megaflow.rollout.engine_warm import WarmProcess

SCHEDULER = ("sglang", "sglang.srt", "sglang.srt.managers", "sglang.srt.managers.scheduler")


def write_environment(path: str) -> None:
    """As a scheduler does, it says in its title who it is."""
    setproctitle.setproctitle("sglang::scheduler")
    Path(path).write_text(json.dumps({**os.environ, "title": Path("/proc/self/cmdline").read_text()}))


def test_variables_that_are_set_after_its_start_reach_the_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in SCHEDULER:  # its import takes a quarter of a minute
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    warm = WarmProcess(multiprocessing.get_context("fork"))
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "8")
    monkeypatch.setenv("NCCL_ALGO", "allreduce:tree")
    warm.give(write_environment, (str(tmp_path / "environment"),)).start()
    warm.join(20)
    found = json.loads((tmp_path / "environment").read_text())
    assert (found["CUDA_DEVICE_MAX_CONNECTIONS"], found["NCCL_ALGO"]) == ("8", "allreduce:tree")
    assert found["title"].startswith("sglang::scheduler")
