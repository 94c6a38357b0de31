"""What people give to the converter that is not what they think it is: every one is named, none leaves a trace or a traceback."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file, save_file

from megaflow.convert.compare import different_settings
from megaflow.shape import shape_of
from megaflow.types import PreflightError
from megaflow.weights.folder import Folder
from tools import convert as tool

LLAMA = {
    "model_type": "llama", "num_hidden_layers": 2, "hidden_size": 8, "intermediate_size": 16, "num_attention_heads": 2,
    "num_key_value_heads": 2, "vocab_size": 5, "max_position_embeddings": 16, "rms_norm_eps": 1e-6, "tie_word_embeddings": True,
}  # fmt: skip
INDEX = "model.safetensors.index.json"


def tensors(has_bias: bool = False) -> dict[str, torch.Tensor]:
    """Of that Llama, by the names that transformers gives them; with biases on q, k and v it is a Qwen2."""
    square, wide = (8, 8), (16, 8)
    sizes = {f"self_attn.{x}_proj": square for x in "qkvo"} | {"mlp.gate_proj": wide, "mlp.up_proj": wide, "mlp.down_proj": (8, 16)}
    sizes |= {"input_layernorm": (8,), "post_attention_layernorm": (8,)}
    layers = {f"model.layers.{i}.{name}.weight": torch.randn(size) for i in range(2) for name, size in sizes.items()}
    if has_bias:
        layers |= {f"model.layers.{i}.self_attn.{x}_proj.bias": torch.randn(8) for i in range(2) for x in "qkv"}
    return layers | {"model.embed_tokens.weight": torch.randn(5, 8), "model.norm.weight": torch.randn(8)}


@pytest.fixture
def model(tmp_path: Path) -> Path:
    path = tmp_path / "model"
    path.mkdir()
    (path / "config.json").write_text(json.dumps(LLAMA))
    save_file(tensors(), path / "model.safetensors", metadata={"format": "pt"})
    return path


@pytest.fixture
def says(capsys) -> Callable[..., None]:
    def check(code: int, message: str, *words: object) -> None:
        capsys.readouterr()
        assert tool.main([str(word) for word in words]) == code
        said = capsys.readouterr()
        assert message in (said.err if code else said.out), said

    return check


def copied(source: Path, name: str, **settings: object) -> Path:
    """A copy with other settings in its config.json."""
    copy = shutil.copytree(source, source.with_name(name))
    (copy / "config.json").write_text(json.dumps(json.loads((copy / "config.json").read_text()) | settings))
    return copy


# --- one model or two ------------------------------------------------------------------------------------------------------------


def test_equal_tensors_under_other_settings_are_another_model(model: Path, says) -> None:
    says(0, "equal bit for bit", "verify", model, copied(model, "same", use_cache=False))
    says(1, "rope_theta: 10000.0 and 500000.0\n", "verify", model, copied(model, "theta", rope_theta=500000.0))
    says(1, "norm_eps: 1e-06 and 1e-05\n", "verify", model, copied(model, "eps", rms_norm_eps=1e-5))
    rope = {"rope_type": "linear", "factor": 2.0}
    says(1, "rope_scaling.factor: None and 2.0\n", "verify", model, copied(model, "scaled", rope_scaling=rope))


def test_one_rotary_embedding_said_in_two_ways_is_one() -> None:
    """As transformers 4 and 5 write the same model."""
    old = LLAMA | {"rope_theta": 5e5, "rope_scaling": {"type": "linear", "factor": 2.0}}
    new = LLAMA | {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 5e5}}
    assert different_settings(shape_of(old, "old"), shape_of(new, "new")) == []
    mixture = {"model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 2}
    one, other = (shape_of(LLAMA | mixture | {"num_experts_per_tok": k}, "x") for k in (1, 2))
    assert different_settings(one, other) == ["experts.top_k: 1 and 2"]


def test_what_is_no_part_of_the_model_is_said_or_refused(model: Path, tmp_path: Path, says) -> None:
    """A Hugging Face folder may carry more than its model; a converted one has exactly what its config.json says."""
    save_file(tensors(has_bias=True), model / "model.safetensors", metadata={"format": "pt"})
    says(0, f"6 tensors of {model} are no part of the model and are left out, e.g. model.layers.", "verify", model, model)
    says(0, f"6 tensors of {model} are no part of the model and are left out", "hf-to-megatron", model, tmp_path / "cut")
    says(0, "files of weights", "hf-to-megatron", copied(model, "qwen2", model_type="qwen2"), tmp_path / "biased")
    config = json.loads((tmp_path / "biased/config.json").read_text())
    (tmp_path / "biased/config.json").write_text(json.dumps(config | {"model_type": "llama"}))
    message = "2 tensors there are no part of the model of its config.json, e.g. decoder.layers.0.self_attention.linear_qkv.bias"
    says(3, message, "megatron-to-hf", tmp_path / "biased", tmp_path / "back")


def test_a_tied_model_is_cut_into_stages_from_any_layout(model: Path, tmp_path: Path, says) -> None:
    """One that was cut without stages holds its embedding once; the last stage gets it, as the Hugging Face folder has it."""
    says(0, "", "hf-to-megatron", model, tmp_path / "tp2", "tp=2")
    says(0, "", "hf-to-megatron", tmp_path / "tp2", tmp_path / "pp2", "pp=2")
    says(0, "", "hf-to-megatron", tmp_path / "pp2", tmp_path / "both", "pp=2", "tp=2")
    embedding = load_file(model / "model.safetensors")["model.embed_tokens.weight"]
    (last,) = (load_file(file)["output_layer.weight"] for file in (tmp_path / "pp2").glob("pp1_tp0-*"))
    assert torch.equal(last[: len(embedding)], embedding) and not last[len(embedding) :].any()
    says(0, "equal bit for bit", "verify", model, tmp_path / "both")


def test_a_tensor_in_two_files_without_an_index_is_refused(model: Path, says) -> None:
    save_file({"model.norm.weight": torch.zeros(8)}, model / "other.safetensors")
    message = f"model.norm.weight is in model.safetensors and in other.safetensors, and there is no {INDEX}"
    says(3, message, "inspect", model)
    with pytest.raises(PreflightError, match="model.norm.weight is in model.safetensors and in other.safetensors"):
        Folder(model)


# --- damage ----------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("text", ["{}", "[]", "null", "{", '{"weight_map": []}', '{"weight_map": {}}', '{"weight_map": {"a": 5}}'])
def test_an_index_that_is_none_is_damaged(model: Path, says, text: str) -> None:
    (model / INDEX).write_text(text)
    says(3, f"{model / INDEX} is damaged: ", "inspect", model)


def test_weights_that_cannot_be_read_say_why(model: Path, says) -> None:
    file = model / "model.safetensors"
    file.unlink()
    file.symlink_to("gone")
    says(3, f"{file} is a link to gone, which is not there\n", "inspect", model)
    file.unlink()
    file.mkdir()
    says(3, f"{file} cannot be read: Is a directory\n", "inspect", model)
    (model / INDEX).symlink_to("gone.json")
    says(3, f"{model / INDEX} is a link to gone.json, which is not there\n", "inspect", model)


def test_a_converted_folders_index_is_checked(model: Path, tmp_path: Path, says) -> None:
    says(0, "", "hf-to-megatron", model, tmp_path / "cut")
    index = tmp_path / "cut/megatron.index.json"
    whole = json.loads(index.read_text())
    without = {key: value for key, value in whole.items() if key != "weight_map"}
    other = {"weight_map": {"pp0_tp0": {"model.norm.weight": "none.safetensors"}}}
    wrong = [without, without | {"weight_map": []}, whole | other, whole | {"layout": {"tp": 0}}, whole | {"layout": {"tp": "2"}}, []]
    for content in wrong:
        index.write_text(json.dumps(content))
        says(3, f"{index} is damaged: ", "inspect", tmp_path / "cut")


@pytest.mark.parametrize("value", ["many", -1, 2.5, [3], {"a": 3}, True, None])
@pytest.mark.parametrize("family", ["llama", "qwen3_moe", "deepseek_v3"])
def test_no_value_in_a_config_is_a_traceback(family: str, value: object) -> None:
    """Each key in turn; what is no number where one is due is refused."""
    of_family = {
        "llama": {"head_dim": 4},
        "qwen3_moe": {
            "head_dim": 4, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8, "decoder_sparse_step": 1,
            "mlp_only_layers": [],
        },
        "deepseek_v3": {
            "q_lora_rank": 4, "kv_lora_rank": 4, "qk_nope_head_dim": 4, "qk_rope_head_dim": 4, "v_head_dim": 4, "n_routed_experts": 4,
            "num_experts_per_tok": 2, "moe_intermediate_size": 8, "n_shared_experts": 1, "routed_scaling_factor": 1.0, "n_group": 1,
        },
    }[family]  # fmt: skip
    raw = LLAMA | {"model_type": family, "rope_theta": 1e4, "rope_scaling": None} | of_family
    assert shape_of(raw, "config.json").num_layers == 2
    for key in raw:
        try:
            shape_of(raw | {key: value}, "config.json")
        except PreflightError:
            continue
        assert value != "many" or key == "tie_word_embeddings", key


def test_inspect_says_whether_it_has_read_the_checksums(model: Path, tmp_path: Path, says) -> None:
    cut = tmp_path / "cut"
    says(0, "", "hf-to-megatron", model, cut)
    says(0, "checksums: every file is as it was written\n", "inspect", cut, "--checksums")
    (file,) = cut.glob("pp0_tp0-*")
    whole = file.read_bytes()
    file.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    says(0, "checksums: not read", "inspect", cut)
    says(3, f"{file} is damaged: its checksum differs from the one written with it\n", "inspect", cut, "--checksums")
    says(0, "checksums: a Hugging Face folder has none\n", "inspect", model, "--checksums")
    says(2, "--checksums is for inspect, not for verify", "verify", model, cut, "--checksums")


# --- where it goes ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("value", ["nan", "inf", "-inf", "1e400", "0"])
def test_a_size_that_is_none_is_refused(model: Path, tmp_path: Path, says, value: str) -> None:
    says(2, f"shard_gb={value} must be more than 0 and finite\n", "megatron-to-hf", model, tmp_path / "x", f"shard_gb={value}")


def test_a_target_that_cannot_be_made_leaves_nothing(model: Path, tmp_path: Path, says, monkeypatch) -> None:
    before = set(tmp_path.rglob("*"))
    below = model / "config.json/x"
    says(1, f"{below}.partial cannot be made: ", "megatron-to-hf", model, below)
    says(1, "Not a directory; nothing was written\n", "megatron-to-hf", model, below)
    says(1, "/proc/new/x.partial cannot be made: /proc/new: No such file or directory; nothing", "megatron-to-hf", model, "/proc/new/x")
    (tmp_path / "x.partial").mkdir()
    (tmp_path / "x.partial/mine").touch()
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=0))
    for target in ("new/deep/x", "x"):
        says(3, "0.07 GB are needed, 0.00 GB are free on that disk\n", "megatron-to-hf", model, tmp_path / target)
    assert set(tmp_path.rglob("*")) - before == {tmp_path / "x.partial", tmp_path / "x.partial/mine"}


def test_a_link_to_nothing_is_no_target(model: Path, tmp_path: Path, says) -> None:
    (tmp_path / "x").symlink_to("gone")
    says(2, f"{tmp_path}/x exists (a link to gone) and is not overwritten", "megatron-to-hf", model, tmp_path / "x")
    assert not (tmp_path / "x.partial").exists() and not (tmp_path / "gone").exists()


@pytest.mark.parametrize("action", ["verify", "inspect"])
def test_of_several_ranks_one_works(model: Path, capsys, monkeypatch, action: str) -> None:
    said = []
    for rank in "01":
        monkeypatch.setenv("RANK", rank)
        monkeypatch.setenv("WORLD_SIZE", "2")
        assert tool.main([action, *[str(model)] * (2 if action == "verify" else 1)]) == 0
        said.append(capsys.readouterr())
    assert said[0].out and (said[1].out, said[1].err) == ("", "")
