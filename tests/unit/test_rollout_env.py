"""What an engine's start does to this process's environment."""

from __future__ import annotations

import os

from megaflow.parallel.device import without_torchrun_env
from megaflow.rollout.engine_args import engine_env
from tests import tiny


def test_the_environment_is_as_before_whatever_sglang_sets(monkeypatch):
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    monkeypatch.delenv("NCCL_CUMEM_ENABLE", raising=False)
    before = dict(os.environ)
    with engine_env(tiny.config("somewhere"), None):
        assert os.environ["MEGAFLOW_ENGINE"] == "1"
        os.environ.update(CUDA_DEVICE_MAX_CONNECTIONS="8", NCCL_CUMEM_ENABLE="0")  # as sglang 0.5.15 does at launch
    assert dict(os.environ) == before


def test_children_do_not_believe_that_they_are_torchruns_workers(monkeypatch):
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    monkeypatch.setenv("RANK", "1")
    with without_torchrun_env():
        assert "RANK" not in os.environ and "TORCHELASTIC_USE_AGENT_STORE" not in os.environ
    assert os.environ["RANK"] == "1" and os.environ["TORCHELASTIC_USE_AGENT_STORE"] == "True"
