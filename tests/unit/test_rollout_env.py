"""What an engine's processes find in their environment, and what stays out of this one's."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
from pathlib import Path

from megaflow.config.caches import CACHES, cache_variables
from megaflow.rollout.engine_env import engine_environment, other_models
from tests import tiny


def folder(path: Path, architecture: str = "Qwen2ForCausalLM") -> str:
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.json").write_text(f'{{"architectures": ["{architecture}"]}}')
    return str(path)


def test_the_engine_is_not_told_that_it_is_torchruns_worker(monkeypatch, tmp_path):
    for name in ("RANK", "LOCAL_RANK", "MASTER_PORT", "TORCHELASTIC_USE_AGENT_STORE", "GROUP_RANK"):
        monkeypatch.setenv(name, "1")
    before = dict(os.environ)
    found = engine_environment(tiny.config(folder(tmp_path)), 0, "/tmp/scratch")
    assert not {"RANK", "LOCAL_RANK", "MASTER_PORT", "TORCHELASTIC_USE_AGENT_STORE", "GROUP_RANK"} & set(found)
    assert found["MEGAFLOW_ENGINE_SCRATCH"] == "/tmp/scratch" and found["TQDM_DISABLE"] == "1"
    assert dict(os.environ) == before, "the rank's own NCCL and CUDA settings must stay: a rank alone with others fails to connect"


def test_compiled_kernels_go_where_run_cache_dir_says_unless_the_user_has_set_another_place(monkeypatch, tmp_path):
    for name in CACHES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TRITON_CACHE_DIR", "/elsewhere")
    config = tiny.config(folder(tmp_path / "m"))
    config = dataclasses.replace(config, run=dataclasses.replace(config.run, cache_dir=str(tmp_path / "kept")))
    found = engine_environment(config, 0)
    assert found["TRITON_CACHE_DIR"] == "/elsewhere"
    assert found["TVM_FFI_CACHE_DIR"] == str(tmp_path / "kept" / "tvm-ffi")
    assert cache_variables("") == {}
    assert cache_variables("~/x")["CUDA_CACHE_PATH"].startswith(str(Path.home()))


def test_sglang_imports_the_file_of_the_model_and_not_the_others(tmp_path):
    others = other_models(folder(tmp_path / "qwen2"))
    assert "qwen2" not in others and "__init__" not in others and {"llama", "mixtral"} <= set(others) and len(others) > 100
    assert other_models(folder(tmp_path / "unknown", "NobodyForCausalLM")) == [], "then SGLang looks for itself"


def test_a_captured_graphs_progress_bar_stays_away():
    """The variable works with the tqdm that is installed."""
    code = "import tqdm; bar = tqdm.tqdm([1, 2]); bar.set_description('x'); print([i for i in bar])"
    done = subprocess.run([sys.executable, "-c", code], env={**os.environ, "TQDM_DISABLE": "1"}, capture_output=True, text=True, timeout=60)
    assert done.stdout.strip() == "[1, 2]" and done.stderr == ""
