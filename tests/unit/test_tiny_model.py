"""The tiny model's folder is one that transformers reads, and its problems are what they claim."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from tools.make_tiny_model import FAMILIES, accuracy, encode, make, make_tokenizer, problems

SMALL = {"layers": 2, "hidden": 32, "heads": 4, "kv_heads": 2}


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("tiny")
    for family in FAMILIES:
        make(root / family, family=family, tied=family != "llama", **SMALL)
    return root


@pytest.mark.parametrize("family", FAMILIES)
def test_the_folder_is_read_by_transformers(folders, family):
    model = AutoModelForCausalLM.from_pretrained(folders / family)
    config = model.config
    assert config.model_type == family and model.dtype == torch.float32
    assert config.vocab_size == 307 and config.vocab_size % 64 != 0
    assert config.tie_word_embeddings is (family != "llama")
    assert ("lm_head.weight" in load_file(folders / family / "model.safetensors")) is (family == "llama")
    assert all(parameter.std() > 0.01 for name, parameter in model.named_parameters() if "norm" in name or "bias" in name)


@pytest.mark.parametrize("family", FAMILIES)
def test_the_tokenizer_read_back_gives_the_same_tokens(folders, family):
    made, read = make_tokenizer(307), AutoTokenizer.from_pretrained(folders / family)
    for text in ("What is 47 + 38?", "héllo wörld\n\t 1234567, x2 = ½", "<|im_start|>user\nWhat is 1?<|im_end|>\n"):
        assert read.encode(text) == made.encode(text)
        assert read.decode(read.encode(text)) == text
    chat = [{"role": "user", "content": "What is 47 + 38?"}]
    text = read.apply_chat_template(chat, add_generation_prompt=True, tokenize=False)
    assert text == "<|im_start|>user\nWhat is 47 + 38?<|im_end|>\n<|im_start|>assistant\n"
    assert len(read) <= 307


@pytest.mark.parametrize("family", FAMILIES)
def test_a_turn_ends_with_im_end(folders, family):
    tokenizer = AutoTokenizer.from_pretrained(folders / family)
    end = tokenizer.encode("<|im_end|>")
    assert len(end) == 1 and tokenizer.eos_token_id == end[0]
    assert GenerationConfig.from_pretrained(folders / family).eos_token_id == end
    assert tokenizer.pad_token == "<|endoftext|>"


def test_the_same_seed_gives_the_same_files_and_another_gives_others(tmp_path):
    state = torch.get_rng_state()
    for name, seed in (("a", 0), ("b", 0), ("c", 1)):
        make(tmp_path / name, seed=seed, data=tmp_path / f"{name}_data", **SMALL)
    read = {name: (tmp_path / name / "model.safetensors").read_bytes() for name in "abc"}
    assert read["a"] == read["b"] != read["c"]
    assert (tmp_path / "a/tokenizer.json").read_bytes() == (tmp_path / "b/tokenizer.json").read_bytes()
    assert (tmp_path / "a_data/train.jsonl").read_bytes() == (tmp_path / "b_data/train.jsonl").read_bytes()
    assert torch.equal(state, torch.get_rng_state())


def test_held_out_problems_are_right_and_not_in_the_training_set():
    train, held_out = problems(0)

    def operands(line: dict[str, str]) -> frozenset[int]:
        a, b = line["prompt"].removeprefix("What is ").removesuffix("?").split(" + ")
        assert 10 <= int(a) <= 99 and 10 <= int(b) <= 99
        assert int(line["answer"]) == int(a) + int(b)
        return frozenset((int(a), int(b)))

    assert len(held_out) == 256 and len(train) > 7500
    assert not {operands(line) for line in train} & {operands(line) for line in held_out}


def test_problems_are_written_as_json_lines(tmp_path):
    make(tmp_path / "model", data=tmp_path / "data", **SMALL)
    lines = [json.loads(line) for line in (tmp_path / "data/eval.jsonl").read_text().splitlines()]
    assert lines == problems(0)[1]


def test_accuracy_is_what_transformers_generates(folders):
    """A model that knows nothing but one token: teacher forcing and generate() must agree on what it gets right."""
    tokenizer = AutoTokenizer.from_pretrained(folders / "qwen2")
    model = AutoModelForCausalLM.from_pretrained(folders / "qwen2")
    prompts, answers = encode(tokenizer, problems(0)[1][:8])
    said = model.generate(prompts, attention_mask=torch.ones_like(prompts), do_sample=False, max_new_tokens=4, min_new_tokens=4)
    said = said[:, prompts.shape[1] :]
    with_right = torch.cat([said[:4], answers[4:]])  # what it says, and true answers that a random model does not give
    assert accuracy(model, prompts, with_right)["greedy"] == 0.5
    logp = torch.log_softmax(model(torch.cat([prompts, said], dim=1)).logits.double(), -1)[:, prompts.shape[1] - 1 : -1]
    expected = logp.gather(-1, said[..., None]).sum((1, 2)).exp().mean().item()
    assert accuracy(model, prompts, said)["sampled"] == pytest.approx(expected, rel=1e-4)


def test_a_few_steps_of_warm_up_run(tmp_path, capsys):
    measured = make(tmp_path, steps=20, **SMALL)
    assert measured["steps"] == 20 and 0 < measured["sampled"] < 0.35
    assert "warm-up step 20" in capsys.readouterr().out


@pytest.mark.parametrize("sizes, message", [
    ({"vocab": 77}, "--vocab 77: needs at least 259"),
    ({"hidden": 30, "heads": 4}, "--hidden 30"),
    ({"heads": 4, "kv_heads": 3}, "--kv-heads 3"),
    ({"family": "gpt5"}, "--family gpt5: one of qwen2"),
])  # fmt: skip
def test_sizes_that_do_not_fit(tmp_path, sizes, message):
    with pytest.raises(ValueError, match=message):
        make(tmp_path, **sizes)
