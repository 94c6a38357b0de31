"""What does not fit model, data or machine is found before anything is allocated, each with its place. The model folder is made by hand."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from megaflow.config.loading import load
from megaflow.plan import preflight
from megaflow.plan.safetensors import read_header
from megaflow.types import ConfigError, PreflightError

LAYERS, HIDDEN, HEADS, KV_HEADS, FFN, VOCAB, POSITIONS = 4, 48, 12, 6, 96, 320, 256
HF_CONFIG = {
    "architectures": ["Qwen2ForCausalLM"],
    "model_type": "qwen2",
    "num_hidden_layers": LAYERS,
    "hidden_size": HIDDEN,
    "intermediate_size": FFN,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "vocab_size": VOCAB,
    "max_position_embeddings": POSITIONS,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": True,
    "hidden_act": "silu",
}
CONFIG = """\
model:
  path: Tiny-1
  dtype: float32
data:
  train:
  - path: t.jsonl
  max_prompt_tokens: 64
sampling:
  max_new_tokens: 32
reward:
  functions:
  - name: exact
"""


def write_safetensors(file: Path, tensors: dict[str, list[int]]) -> None:
    """By the format's own description: length, header, zeros."""
    header, end = {}, 0
    for name, shape in tensors.items():
        size = 4
        for dim in shape:
            size *= dim
        header[name] = {"dtype": "F32", "shape": shape, "data_offsets": [end, end + size]}
        end += size
    text = json.dumps(header).encode()
    file.write_bytes(len(text).to_bytes(8, "little") + text + bytes(end))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model folder, data and a config file, made once and copied for each test."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    base = tmp_path_factory.mktemp("preflight")
    model = base / "Tiny-1"
    model.mkdir()
    (model / "config.json").write_text(json.dumps(HF_CONFIG))
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())  # one token a byte, so that tokens can be counted by eye
    vocabulary = {letter: number for number, letter in enumerate([*letters, "<|endoftext|>"])}
    Tokenizer(models.BPE(vocabulary, [])).save(str(model / "tokenizer.json"))
    template = "{% for m in messages %}{{ m['role'] }} {{ m['content'] }} {% endfor %}"
    settings = {"tokenizer_class": "Qwen2Tokenizer", "eos_token": "<|endoftext|>", "chat_template": template}
    (model / "tokenizer_config.json").write_text(json.dumps(settings))
    tensors = {"model.embed_tokens.weight": [VOCAB, HIDDEN]} | {f"model.layers.{i}.input_layernorm.weight": [HIDDEN] for i in range(LAYERS)}
    write_safetensors(model / "model.safetensors", tensors)
    (base / "t.jsonl").write_text('{"prompt": "what is 1 + 2 ?", "answer": "3"}\n')
    (base / "x.yaml").write_text(CONFIG)
    return base


@pytest.fixture
def here(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    shutil.copytree(folder, tmp_path / "w")
    monkeypatch.chdir(tmp_path / "w")
    return tmp_path / "w"


def complaint(overrides: list[str] = [], world_size: int = 4, kind: type[Exception] = PreflightError) -> str:  # noqa: B006
    with pytest.raises(kind) as caught:
        preflight.check(load("x.yaml", overrides), world_size)
    assert type(caught.value) is kind
    assert len(str(caught.value).splitlines()) == 1, caught.value
    return str(caught.value)


def test_facts_of_a_sound_run(here: Path) -> None:
    facts = "\n".join(preflight.check(load("x.yaml", ["parallel.tp=2", "parallel.pp=2", "rollout.tp=2"]), 4))
    assert "model: Tiny-1, qwen2" in facts and "4 layers, 12 heads, 6 key/value heads, float32" in facts
    assert f"weights: {1 + LAYERS} tensors in 1 file(s)" in facts
    assert "actor: tp 2, pp 2, 2 layers a stage" in facts and "engines: 2 of 2 rank(s), backend sglang" in facts
    assert "lengths: 64 + 32 of 256 positions" in facts and "tokenizer: 257 tokens, template chat" in facts
    assert "data.train.0: t, first prompt has 21 tokens" in facts, "`user what is 1 + 2 ? ` has 21 letters"
    assert "reward.functions.0: exact loads" in facts and "run: runs/run, " in facts
    assert not (here / "runs").exists(), "a preflight writes nothing"


@pytest.mark.parametrize(
    ("overrides", "parts"),
    [
        (["parallel.tp=4"], ["argument parallel.tp=4: parallel.tp=4 does not divide num_key_value_heads=6 of Tiny-1; use 1, 2, 3 or 6"]),
        (["parallel.tp=5"], ["num_attention_heads=12 and num_key_value_heads=6 and intermediate_size=96 of Tiny-1"]),
        (["parallel.pp=3"], ["parallel.pp=3 does not divide num_hidden_layers=4 of Tiny-1; use 1, 2 or 4"]),
        (["rollout.tp=4"], ["argument rollout.tp=4: rollout.tp=4 does not divide num_key_value_heads=6 of Tiny-1"]),
        (["data.max_prompt_tokens=250"], ["=250 and x.yaml:9: ", "250 + sampling.max_new_tokens=32 = 282 exceeds", "embeddings=256"]),
        (["data.train.0.path=none.jsonl"], ["argument data.train.0.path=none.jsonl: ", "no such file"]),
        (["data.prompt_key=question"], ["x.yaml:6: t.jsonl:1: no key 'question'", "prompt, answer"]),
        (["data.answer_key=solution"], ["x.yaml:6: t.jsonl:1: no key 'solution' (data.answer_key), which reward exact compares with"]),
        (["run.root=t.jsonl"], ["argument run.root=t.jsonl: ", "t.jsonl is a file, not a folder"]),
        (["model.path=Tiny-2"], ["argument model.path=Tiny-2: model.path=Tiny-2: no config.json there"]),
        (["monitor.trackers=[no_such_tracker]"], ["no_such_tracker is not installed: pip install no_such_tracker"]),
    ],
)
def test_does_not_fit(here: Path, overrides: list[str], parts: list[str]) -> None:
    message = complaint(overrides, world_size=60)
    assert all(part in message for part in parts), message


def test_an_engine_may_have_more_ranks_than_key_value_heads(here: Path) -> None:
    preflight.check(load("x.yaml", ["rollout.tp=12"]), 12)


def test_the_line_of_the_file_is_named(here: Path) -> None:
    Path("x.yaml").write_text(CONFIG + "parallel:\n  tp: 4\n")
    assert complaint() == "x.yaml:14: parallel.tp=4 does not divide num_key_value_heads=6 of Tiny-1; use 1, 2, 3 or 6"


def model_config(**changes: Any) -> Callable[[Path], None]:
    return lambda folder: (folder / "Tiny-1/config.json").write_text(json.dumps(HF_CONFIG | changes)) and None


def copied(folder: Path) -> None:
    (folder / "Tiny-1/extra.safetensors").write_bytes((folder / "Tiny-1/model.safetensors").read_bytes())


def truncate(folder: Path) -> None:
    file = folder / "Tiny-1/model.safetensors"
    file.write_bytes(file.read_bytes()[:-5])


def add_an_index(folder: Path, weight_map: dict[str, str]) -> None:
    (folder / "Tiny-1/model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


def no_template(folder: Path) -> None:
    settings = json.loads((folder / "Tiny-1/tokenizer_config.json").read_text())
    del settings["chat_template"]
    (folder / "Tiny-1/tokenizer_config.json").write_text(json.dumps(settings))


BROKEN: dict[str, tuple[Callable[[Path], Any], list[str]]] = {
    "family": (
        model_config(model_type="gemma"),
        ["x.yaml:2: Tiny-1/config.json: model_type 'gemma'", "supported: deepseek_v3, llama, mistral, mixtral, qwen2"],
    ),
    "config.json": (lambda f: (f / "Tiny-1/config.json").write_text("{"), ["x.yaml:2: Tiny-1/config.json:1: not JSON"]),
    "config.json, a list": (lambda f: (f / "Tiny-1/config.json").write_text("[]"), ["Tiny-1/config.json: holds a list and not"]),
    "config.json, null": (lambda f: (f / "Tiny-1/config.json").write_text("null"), ["json: holds a NoneType and not"]),
    "config.json, bytes": (lambda f: (f / "Tiny-1/config.json").write_bytes(b"{\xff"), ["not JSON: not UTF-8 at byte 1"]),
    "a size in words": (model_config(num_hidden_layers="4"), ["json: num_hidden_layers is '4', which must be a whole number"]),
    "a flag in words": (model_config(tie_word_embeddings="false"), ["tie_word_embeddings is 'false', which must be true or false"]),
    "a tensor twice": (copied, ["is in extra.safetensors and in model.safetensors, and there is no model.safetensors.index"]),
    "no heads": (model_config(num_attention_heads=0), ["num_attention_heads is 0, which must be a whole number, at least 1"]),
    "rope in words": (model_config(rope_scaling="linear"), ["rope_scaling is 'linear', which must be an object or null"]),
    "layers": (model_config(num_hidden_layers=6), ["config.json says 6 layers, the weights lack layer 4, 5"]),
    "vocabulary": (model_config(vocab_size=8), ["tokenizer of Tiny-1 has 257 tokens, more than vocab_size=8"]),
    "no weights": (lambda f: (f / "Tiny-1/model.safetensors").unlink(), ["x.yaml:2: Tiny-1: no *.safetensors"]),
    "truncated": (truncate, ["x.yaml:2: Tiny-1/model.safetensors is truncated: ", "download the model again"]),
    "cut header": (lambda f: (f / "Tiny-1/model.safetensors").write_bytes(b"\x80\0\0\0\0\0\0\0{"), ["not a safetensors file"]),
    "LFS pointer": (lambda f: (f / "Tiny-1/model.safetensors").write_text("version https://git-lfs"), ["not a safetensors file"]),
    "missing part": (lambda f: add_an_index(f, {"a": "model-2.safetensors"}), ["names files that are not there: model-2.safetensors"]),
    "wrong index": (lambda f: add_an_index(f, {"a": "model.safetensors"}), ["says that a is in model.safetensors, which does not have it"]),
    "index": (lambda f: (f / "Tiny-1/model.safetensors.index.json").write_text("{}"), ["index.json: cannot be read: KeyError"]),
    "no tokenizer": (
        lambda f: [(f / "Tiny-1" / name).unlink() for name in ("tokenizer.json", "tokenizer_config.json")],
        ["x.yaml:2: ", "no tokenizer in this folder"],
    ),
    "broken tokenizer": (lambda f: (f / "Tiny-1/tokenizer.json").write_text("{"), ["x.yaml:2: ", "tokenizer does not load"]),
    "no template": (no_template, ["x.yaml:2: data.template=chat, but the tokenizer of Tiny-1 has no", "use data.template=plain"]),
    "empty data": (lambda f: (f / "t.jsonl").write_text("\n"), ["x.yaml:6: t.jsonl holds no prompts"]),
    "empty prompt": (lambda f: (f / "t.jsonl").write_text('{"prompt": " ", "answer": 1}\n'), ["t.jsonl:1: the first prompt is empty"]),
    "not JSON": (lambda f: (f / "t.jsonl").write_text("prompt,answer\n"), ["x.yaml:6: t.jsonl:1: not JSON"]),
}


@pytest.mark.parametrize("case", BROKEN)
def test_broken_folder(here: Path, case: str) -> None:
    damage, parts = BROKEN[case]
    damage(here)
    message = complaint()
    assert all(part in message for part in parts), message


def test_the_header_reader_agrees_with_the_library(tmp_path: Path) -> None:
    import numpy
    from safetensors.numpy import save_file

    file = tmp_path / "a.safetensors"
    save_file({"x": numpy.zeros((3, 5), numpy.float32), "y": numpy.zeros(0, numpy.int64)}, str(file), metadata={"format": "pt"})
    header = read_header(file)
    assert {name: entry["shape"] for name, entry in header.items()} == {"x": [3, 5], "y": [0]}


@pytest.mark.parametrize(
    ("text", "overrides", "parts"),
    [
        ("", [], [".py has no 'f'"]),
        ("import nothing_of_the_kind\n", [], ["cannot import own.py", "nothing_of_the_kind"]),
        ("f = 3\n", [], ["is a int, not a function"]),
        ("def f(response):\n    return 1.0\n", [], ["cannot be called as fn(response, answer, prompt, **options)"]),
        ("def f(a, b, c, scale=1):\n    return 1.0\n", ["reward.functions.0.options={scael: 2}"], ["no option 'scael'", "'scale'"]),
    ],
)
def test_a_reward_function_of_ones_own(here: Path, text: str, overrides: list[str], parts: list[str]) -> None:
    Path("own.py").write_text(text)
    message = complaint(["reward.functions.0.name=own.py:f", *overrides], kind=ConfigError)
    assert message.startswith("argument reward.functions.0.name=own.py:f"), message
    assert all(part in message for part in parts), message


def test_a_loss_of_ones_own(here: Path) -> None:
    Path("own.py").write_text("x = 1\n")
    assert complaint(["algo.loss=own.py:f"], kind=ConfigError).startswith("argument algo.loss=own.py:f: loss 'own.py:f': own.py has no 'f'")


@pytest.mark.parametrize(
    ("tracker", "message"),
    [
        ("nomod:x", "tracker 'nomod:x': cannot import nomod: ModuleNotFoundError"),
        ("json:nope", "tracker 'json:nope': json has no 'nope'"),
        ("json:__name__", "monitor.trackers: json:__name__ is a str, not a class or function"),
    ],
)
def test_a_tracker_of_ones_own(here: Path, tracker: str, message: str) -> None:
    found = complaint([f"monitor.trackers=['{tracker}']"], kind=ConfigError)
    assert found.startswith(f"argument monitor.trackers=['{tracker}']: {message}")
    Path("mine.py").write_text("class Tracker:\n    pass\n")
    assert "tracker: mine.py:Tracker loads" in preflight.check(load("x.yaml", ["monitor.trackers=['mine.py:Tracker']"]), 1)


def test_plain_template_needs_no_chat_template(here: Path) -> None:
    no_template(here)
    facts = preflight.check(load("x.yaml", ["data.template=plain"]), 1)
    assert any("first prompt has 15 tokens" in fact for fact in facts)


def test_disk_room_by_hand(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # qkv 24*4*48 + o 48*48 + mlp 3*48*96 + two norms 96 + qkv bias 96 = 20,928 a layer; 4 layers, norm 48, embedding 320*48
    layer = 24 * 4 * 48 + 48 * 48 + 3 * 48 * 96 + 96 + 96
    parameters = 4 * layer + 48 + 320 * 48
    needed = parameters * (4 + 8) * 3 + parameters * 4  # fp32: weights and two moments, two kept and one being written; and the HF export
    usage = shutil.disk_usage(here)
    overrides = ["run.export_hf=true"]
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=needed))
    preflight.check(load("x.yaml", overrides), 1)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=needed - 1))
    assert "run.keep_last=2 and the one being written" in complaint(overrides, 1)


def test_all_that_does_not_fit_is_told_at_once(here: Path) -> None:
    with pytest.raises(PreflightError) as caught:
        preflight.check(load("x.yaml", ["parallel.tp=4", "data.train.0.path=none.jsonl", "run.root=t.jsonl"]), 4)
    assert len(str(caught.value).splitlines()) == 3
