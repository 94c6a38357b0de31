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
    """The tied one has no output layer to give to the last stage: it gets the embedding."""
    base, _ = trained
    for name, axes in (("dense", ["tp=2", "pp=2"]), ("experts", ["pp=2", "ep=4"])):
        run, model = base / name, f"model={base}/{name}/model"
        assert tool.main(["hf-to-megatron", str(run), str(tmp_path / name), *axes, model]) == 0
        assert tool.main(["verify", str(run), str(tmp_path / name), model]) == 0
        assert tool.main(["inspect", str(run), "--checksums"]) == 0
        assert "checksums: every file is as it was written\n" in capsys.readouterr().out
    assert tool.main(["megatron-to-hf", str(base / "dense"), str(tmp_path / "hf"), f"model={base}/dense/model"]) == 0
    embedding = load_file(tmp_path / "hf/model.safetensors")["model.embed_tokens.weight"]
    for rank, part in enumerate(torch.nn.functional.pad(embedding, (0, 0, 0, 320 - len(embedding))).chunk(2)):
        (file,) = (tmp_path / "dense").glob(f"pp1_tp{rank}-*")
        assert torch.equal(load_file(file)["output_layer.weight"], part)
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
    says(f"is of another model than {base}/experts/model:", model="experts")
    says("\n  qk_norm: False in the checkpoint, True by config.json\n", model="experts")
    config = json.loads((base / "dense/model/config.json").read_text())
    beyond = "1 tensors of the checkpoint are no part of that model: decoder.layers.self_attention.linear_qkv.bias"
    layers = "7 tensors of the checkpoint are no part of that model: decoder.layers.self_attention.linear_qkv.layer_norm_weight[1], "
    wrong = {
        "unbiased": ({"model_type": "llama"}, "\n  qkv_bias: True in the checkpoint, False by config.json\n  " + beyond),
        "short": ({"num_hidden_layers": 1}, "\n  num_layers: 2 in the checkpoint, 1 by config.json\n  " + layers),
    }
    run = tmp_path / "run"
    shutil.copytree(copy, run / "checkpoints" / copy.name)
    (run / "config.yaml").write_text(f"model: {{path: {base}/experts/model}}")  # where another model lies by now: one may still look
    assert tool.main(["inspect", str(run)]) == 0 and tool.main(["megatron-to-hf", str(run), str(tmp_path / "hf")]) == 3
    (run / "config.yaml").write_text("model: []")
    assert tool.main(["inspect", str(run)]) == 0 and tool.main(["megatron-to-hf", str(run), str(tmp_path / "hf")]) == 2
    for name, (settings, message) in wrong.items():
        shutil.copytree(base / "dense/model", base / name / "model")
        (base / name / "model/config.json").write_text(json.dumps(config | settings))
        says(message, model=name)
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
