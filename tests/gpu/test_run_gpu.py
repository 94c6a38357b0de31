"""Whole runs on one or two GPUs: engines and a rank that are lost, a rank that stands still, nothing kept on the device."""

from __future__ import annotations

import gzip
import json
import pickle
from pathlib import Path

import pytest
import torch

from tests.e2e.program import TRAIN, Program, describe, last_step, metrics, run, samples, status, write_config
from tests.ranks import PROGRAMS
from tools.make_tiny_model import make

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
    pytest.mark.timeout(600),
]
RANKS = min(2, torch.cuda.device_count())
STEPS = 5


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("made")
    make(folder / "model", data=folder / "data")
    return folder


def config(made: Path, name: str, **sections) -> tuple[str, Path]:
    settings = {
        "run": {"steps": STEPS, "save_every": 1, "export_hf": True},
        "model": {"path": str(made / "model"), "dtype": "bfloat16"},
        "parallel": {"tp": RANKS},
        "rollout": {"backend": "sglang", "mem_fraction": 0.1},
        "eval": {"before": False, "after": False},
    }
    for section, values in sections.items():
        settings.setdefault(section, {}).update(values)
    return write_config(made / f"{name}.yaml", made, **settings), made / "runs" / name


@pytest.fixture(scope="module")
def straight(made: Path) -> Path:
    path, directory = config(made, "straight")
    code, output = run(made, RANKS, TRAIN, "--config", path, timeout=400)
    assert code == 0, output[-5000:]
    return directory


def test_every_step_is_proven_and_saved_beside_the_next(straight: Path) -> None:
    """bf16 on both sides; measured on an H200: see test_cuda.py's tolerance of the mean."""
    lines = metrics(straight)
    assert [m["step"] for m in lines] == list(range(1, STEPS + 1))
    assert all(m["sync/proof"] == 1 and m["mismatch/logp_abs_diff"] < 0.03 for m in lines)
    assert all(m["train/grad_norm"] > 0 and m["train/skipped"] == 0 for m in lines)
    assert len([m for m in lines if "save/write_s" in m]) >= STEPS - 2
    print("device after sleep", [m["mem/rollout/device_gb"] for m in lines], "waited", [m.get("save/wait_s") for m in lines])
    assert status(straight)["checkpoint"] == STEPS


def test_a_run_that_loses_engines_and_a_rank_ends_as_the_undisturbed_one(made: Path, straight: Path) -> None:
    """One engine is killed, one hangs, a rank is killed: as tests/e2e/test_sglang_run.py does on CPU. `run.deterministic` is on."""
    path, directory = config(made, "lossy", rollout={"timeout_s": 20})
    with Program(made / "lossy.log", RANKS, TRAIN, "--config", path, restarts=1) as life:
        life.wait_until(lambda: last_step(directory) >= 1, 300, "step 1")
        life.engines()[0].kill()
        life.wait_until(lambda: life.output.count("the engine is back") == 1, 200, "another engine")
        life.wait_until(lambda: last_step(directory) >= 2, 100, "step 2")
        life.schedulers()[-1].suspend()
        life.wait_until(lambda: life.output.count("the engine is back") == 2, 200, "another engine")
        engines = [*life.engines(), *life.schedulers()]
        if RANKS > 1:  # one rank alone has no launcher that starts it again
            life.ranks()[1].kill()
        assert life.wait(300) == 0, life.output[-5000:]
        assert not any(p.is_running() for p in engines)
    left = life.family()
    assert not left, describe(left)
    assert status(directory)["state"] == "done" and [m["step"] for m in metrics(directory)] == list(range(1, STEPS + 1))
    assert all(m["sync/proof"] == 1 and m["mismatch/logp_abs_diff"] < 0.03 for m in metrics(directory))
    assert samples(directory) == samples(straight)
    assert (directory / "hf/model.safetensors").read_bytes() == (straight / "hf/model.safetensors").read_bytes()


def test_a_run_that_keeps_nothing_on_the_device_says_the_same_and_goes_on(made: Path, straight: Path) -> None:
    """Weights and optimizer in pinned host memory while the engine works, the engine's weights while the actor does; then resumed. Its
    second step is traced, kernels too."""
    asleep = {"actor": {"offload": "all"}, "rollout": {"sleep_level": "1"}, "profile": {"steps": "2"}}
    path, directory = config(made, "asleep", **asleep)
    code, output = run(made, RANKS, TRAIN, "--config", path, "run.steps=2", timeout=300)
    assert code == 0, output[-5000:]
    for rank in range(RANKS):
        events = json.loads(gzip.decompress((directory / f"profile/rank_{rank}.json.gz").read_bytes()))["traceEvents"]
        assert {"phase: update"} <= {e.get("name") for e in events} and any(e.get("cat") == "kernel" for e in events)
    phases = json.loads((directory / "profile/phases.json").read_text())["traceEvents"]
    assert {e["tid"] for e in phases if e["ph"] == "X" and e["name"] == "update"} == set(range(RANKS))
    code, output = run(made, RANKS, TRAIN, "--config", path, "run.steps=3", timeout=300)
    assert code == 0 and "resuming from" in output, output[-5000:]
    print("device after sleep", [m["mem/rollout/device_gb"] for m in metrics(directory)])
    its = samples(straight)
    assert samples(directory) == {name: its[name] for name in ("step_1.jsonl", "step_2.jsonl", "step_3.jsonl")}


@pytest.mark.skipif(RANKS < 2, reason="needs two GPUs")
def test_a_stopped_rank_is_found_while_the_other_waits_in_nccl(made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STOPPED_AT", str(tmp_path / "stopped_at"))
    path, directory = config(
        made, "still", algo={"loss": f"{PROGRAMS / 'stops.py'}:stopping_loss"}, watchdog={"first_factor": 10.0, "phases": {"update": 10.0}},
        rollout={"backend": "hf"},
    )  # fmt: skip
    with Program(tmp_path / "log", 2, TRAIN, "--config", path) as program:
        program.wait_until(lambda: (tmp_path / "stopped_at").exists(), 200, "the stop")
        seconds = program.seconds_to_its_end(tmp_path / "stopped_at", 90)
        output = program.output
    found = status(directory)
    print(f"{seconds:.1f} s after the stop: {found['message']}")
    assert (found["state"], found["exit_code"], last_step(directory)) == ("stalled", 6, 2)
    for text in ("rank 0 waits in ", " of ranks 0-1", "for rank 1. Rank 1 is in `update: micro-batch ", "and does not answer: T (stopped)"):
        assert text in found["message"]
    assert seconds < 40 and "in stopping_loss" in output.partition("--- rank 1")[2]
    recorded = pickle.loads(next(directory.glob("stall-*/rank0.flight_recorder.pickle")).read_bytes())
    open_ = [entry["profiling_name"] for entry in recorded["entries"] if not entry["retired"]]
    assert any(name.startswith("nccl:") for name in open_), open_
