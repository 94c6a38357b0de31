"""A training checkpoint, whatever layout saved it, as a Hugging Face folder: the weights are those that the ranks held."""

from __future__ import annotations

import json
import shutil
import zlib
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from megaflow.shape import read_shape
from megaflow.weights.table import Row, table
from tests import tiny
from tests.ranks import run_ranks
from tools import convert as tool

MODELS = {"dense": ("qwen2", True), "experts": ("qwen3_moe", False)}  # equal layers are saved as one tensor, those with experts apart


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> tuple[Path, list[dict]]:
    """base with <name>/model and <name>/checkpoints; what each of two ranks (tp 2, ep 2) held when it had saved, by name."""
    base = tmp_path_factory.mktemp("trained")
    for name, (family, tied) in MODELS.items():
        tiny.model_folder(base / name / "model", family, tied, layers=2)
    jobs = [
        {"model": str(base / name / "model"), "steps": 1, "save": str(base / name / "checkpoints"), "dtype": "bfloat16"} for name in MODELS
    ]
    found = run_ranks("checkpoint_train", 2, "2", "1", json.dumps(jobs), json.dumps({"ep": 2, "sp": True}))
    return base, [{name: job["state"] for name, job in zip(MODELS, rank["jobs"], strict=True)} for rank in found]


def digest(t: torch.Tensor) -> str:
    """As tests/programs/checkpoint_train.py reports a rank's parameters."""
    return f"{t.dtype} {tuple(t.shape)} {zlib.crc32(t.contiguous().view(torch.uint8).numpy().tobytes()):08x}"


def shard(row: Row, hf: dict[str, torch.Tensor], rank: int, shape) -> torch.Tensor | None:
    """What `rank` of tp 2, ep 2, etp 1 holds."""
    if row.expert >= 0:
        return row.kind.split([hf[n] for n in row.hf], 1, 0, shape) if row.expert * 2 // shape.experts.count == rank else None
    return row.kind.split([hf[n] for n in row.hf], 2, rank, shape)


@pytest.mark.parametrize("name", MODELS)
def test_a_checkpoint_becomes_what_the_ranks_held(trained, tmp_path: Path, capsys, name: str) -> None:
    base, held = trained
    model, run = base / name / "model", base / name
    assert tool.main(["megatron-to-hf", str(run), str(tmp_path / "hf")]) == 2
    assert f"which model is it? there is no {run}/config.yaml that says it; give model=" in capsys.readouterr().err
    assert tool.main(["megatron-to-hf", str(run), str(tmp_path / "hf"), f"model={model}"]) == 0
    hf, shape = load_file(tmp_path / "hf/model.safetensors"), read_shape(tmp_path / "hf")
    config = json.loads((tmp_path / "hf/config.json").read_text())
    assert config["dtype"] == "bfloat16" and (tmp_path / "hf/tokenizer.json").is_file()
    assert hf.keys() == load_file(model / "model.safetensors").keys()
    compared = 0
    for rank in range(2):
        for row in table(shape):
            if (t := shard(row, hf, rank, shape)) is not None:
                assert digest(t) == held[rank][name][row.megatron], row.megatron
                compared += 1
    assert compared >= 2 * len(table(shape)) - (8 if name == "experts" else 0) * shape.num_layers
    capsys.readouterr()
    assert tool.main(["verify", str(run), str(tmp_path / "hf"), f"model={model}"]) == 0
    assert "equal bit for bit" in capsys.readouterr().out


def test_a_checkpoint_is_cut_for_another_layout(trained, tmp_path: Path, capsys) -> None:
    base, _ = trained
    run, model = base / "experts", f"model={base}/experts/model"
    assert tool.main(["hf-to-megatron", str(run), str(tmp_path / "cut"), "pp=2", "ep=4", model]) == 0
    assert tool.main(["verify", str(run), str(tmp_path / "cut"), model]) == 0
    capsys.readouterr()
    assert tool.main(["inspect", str(run)]) == 0
    said = capsys.readouterr().out
    assert "step: 1\nsaved with: world=2 tp=2 pp=1" in said and "training checkpoint" in said


def test_a_damaged_or_foreign_checkpoint_is_refused_by_name(trained, tmp_path: Path, capsys) -> None:
    def says(message: str, model: str = "dense") -> None:
        assert tool.main(["megatron-to-hf", str(copy), str(tmp_path / "hf"), f"model={base}/{model}/model"]) == 3
        assert message in capsys.readouterr().err
        assert not (tmp_path / "hf").exists()

    base, _ = trained
    copy = tmp_path / "step_000001"
    shutil.copytree(base / "dense/checkpoints/step_000001", copy)
    says("it is of another model than", model="experts")
    file = copy / "__1_0.distcp"
    whole = file.read_bytes()
    file.write_bytes(whole[:5000] + bytes([whole[5000] ^ 1]) + whole[5001:])
    says(f"{file} is damaged: its checksum differs")
    shutil.rmtree(tmp_path / "hf.partial")
    file.write_bytes(whole[:-1])
    says(f"{file} is damaged: {len(whole) - 1:,} bytes, written were {len(whole):,}")
    (copy / ".metadata").unlink()
    file.write_bytes(whole)
    says(f"{copy}/.metadata is missing")
