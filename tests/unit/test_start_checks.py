"""What a dry run finds of the files that a start reads: a checkpoint to go on from, and weights that are cut for a Megatron layout."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from megaflow.checkpoint import manifest
from megaflow.config.loading import load
from megaflow.plan import preflight
from megaflow.trainer import start_checks
from megaflow.types import ConfigError, PreflightError, UserError
from tests import tiny
from tools import convert


def dry(*overrides: str, purpose: str = "train") -> str:
    return "\n".join(preflight.check(load("x.yaml", list(overrides)), 1, start_checks.of_a_dry_run(purpose)))


def refusal(kind: type[UserError], *overrides: str, purpose: str = "train") -> str:
    with pytest.raises(kind) as caught:
        dry(*overrides, purpose=purpose)
    return str(caught.value)


def flip(file: Path) -> None:
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)


@pytest.fixture
def checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Of another run, at step 5, as far as a dry run looks."""
    monkeypatch.chdir(tmp_path)
    Path("x.yaml").write_text("model: {path: m}\n")
    path = Path("runs/other/checkpoints/step_000005")
    path.mkdir(parents=True)
    (path / "a.bin").write_bytes(bytes(range(256)) * 1000)
    files = {"a.bin": manifest.measure(path / "a.bin")}
    manifest.write(path, manifest.Manifest(manifest.FORMAT, 5, {"world": 1}, {}, {}, files))
    return path


@pytest.mark.parametrize("purpose", ["train", "evaluate"])
def test_the_checkpoint_of_run_resume(checkpoint: Path, purpose: str, monkeypatch: pytest.MonkeyPatch) -> None:
    resume = f"run.resume={checkpoint}"
    assert dry("run.resume=never", purpose=purpose) == dry(purpose=purpose) == ""
    assert dry(resume, purpose=purpose) == f"run.resume: {checkpoint}, step 5, 1 file(s), 0.000 GiB, checksums right"
    flip(checkpoint / "a.bin")
    assert f"argument {resume}: {checkpoint}/a.bin is damaged: its checksum differs" in refusal(PreflightError, resume, purpose=purpose)
    monkeypatch.setattr(start_checks, "MOST_READ", 1000)
    assert dry(resume, purpose=purpose).endswith("NOT read: checksums of 0 GiB; the start compares them")
    (checkpoint / "a.bin").write_bytes(b"short")
    assert "there is no complete checkpoint there" in refusal(ConfigError, resume, purpose=purpose)
    model = Path("model")
    model.mkdir()
    (model / "config.json").write_text("{}")
    assert "run.resume=model: there is no complete checkpoint there" in refusal(ConfigError, "run.resume=model", purpose=purpose)


def test_auto_looks_at_the_runs_own_newest(checkpoint: Path) -> None:
    assert f"run.resume: {checkpoint}, step 5" in dry("run.name=other")
    assert "is finished: it made all its 5 steps" in refusal(ConfigError, "run.name=other", "run.steps=3")
    assert "other is already used by a run" in refusal(ConfigError, "run.name=other", "run.resume=never")
    flip(checkpoint / "a.bin")
    assert "a.bin is damaged" in refusal(PreflightError, "run.name=other")


def test_a_converted_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("x.yaml").write_text("model: {path: cut}\n")
    assert convert.main(["hf-to-megatron", tiny.model_folder(tmp_path / "m"), "cut", "tp=2", "pp=2"]) == 0
    said = "model.path: converted for tp=2 pp=2 vpp=1 ep=1 etp=1, 4 file(s), 0.003 GiB, "
    assert dry() == said + "checksums right"
    assert preflight.check(load("x.yaml", []), 1, start_checks.of_a_start()) == [said + "checksums are compared at the start"]
    assert "leaves a reward model's head out; give the Hugging Face folder" in refusal(PreflightError, "reward.model.path=cut")
    file, index = Path("cut/pp1_tp1-00001-of-00001.safetensors"), Path("cut/megatron.index.json")
    whole = file.read_bytes()
    flip(file)
    assert f"{file} is damaged: its checksum differs" in refusal(PreflightError)
    file.write_bytes(whole[:-8])
    assert f"{file} is damaged: " in refusal(PreflightError)
    file.unlink()
    assert f"{file} is missing" in refusal(PreflightError)
    file.write_bytes(whole)
    content = json.loads(index.read_text())
    del content["weight_map"]["pp1_tp1"]["decoder.layers.3.mlp.linear_fc2.weight"]
    index.write_text(json.dumps(content))
    assert "cut: the files pp1_tp1-* have no tensor decoder.layers.3.mlp.linear_fc2.weight" in refusal(PreflightError)
