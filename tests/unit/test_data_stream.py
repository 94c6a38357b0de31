"""Prompts in tokens, their order over steps and epochs, and the saved cursor."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from megaflow.config.schema import DataConfig, SourceConfig
from megaflow.data import PromptStream, load_tokenizer
from megaflow.types import ConfigError, PreflightError

TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'tool' %}{{ raise_exception('no tools here') }}{% endif %}"
    "<{{ m.role }}> {{ m.content }} {% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
VOCAB = ["<unk>", "<s>", "<system>", "<user>", "<assistant>", "add", "be", "brief"] + [str(i) for i in range(100)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A tokenizer of whole words, so that token numbers can be read off VOCAB; it puts <s> before plain text."""
    from tokenizers import Tokenizer, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    inner = Tokenizer(models.WordLevel({word: i for i, word in enumerate(VOCAB)}, unk_token="<unk>"))
    inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    inner.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    path = tmp_path_factory.mktemp("tokenizer")
    PreTrainedTokenizerFast(tokenizer_object=inner, chat_template=TEMPLATE, unk_token="<unk>").save_pretrained(path)
    return str(path)


@pytest.fixture(scope="module")
def tokenizer(folder: str) -> Any:
    return load_tokenizer(folder)


def source(path: Path, *prompts: object, **extra: object) -> SourceConfig:
    path.write_text("".join(json.dumps({"prompt": prompt, "answer": i, **extra}) + "\n" for i, prompt in enumerate(prompts)))
    return SourceConfig(path=str(path))


@pytest.fixture
def ten(tmp_path: Path) -> SourceConfig:
    return source(tmp_path / "ten.jsonl", *(f"add {i}" for i in range(10)))


def ids(prompts: list[Any]) -> list[int]:
    return [int(prompt.id.partition(":")[2].partition("#")[0]) for prompt in prompts]


def test_chat_template_and_plain_by_hand(tmp_path: Path, tokenizer: Any):
    chat = [{"role": "user", "content": "add 2"}, {"role": "assistant", "content": "3"}, {"role": "user", "content": "4"}]
    config = DataConfig(train=[source(tmp_path / "a.jsonl", "add 1", chat, level="x")], system="be brief", shuffle=False)
    first, second = PromptStream(config, tokenizer, 2, seed=0).next()
    word = VOCAB.index
    assert first.text == "<system> be brief <user> add 1 <assistant>"
    assert first.tokens == [word("<system>"), word("be"), word("brief"), word("<user>"), word("add"), word("1"), word("<assistant>")]
    assert (first.id, first.answer, first.meta) == ("a:1", 0, {"level": "x"})
    assert second.text == "<user> add 2 <assistant> 3 <user> 4 <assistant>"  # a list of messages brings its own system message, or none

    config = DataConfig(train=[source(tmp_path / "b.jsonl", "add 1")], template="plain", shuffle=False)
    (plain,) = PromptStream(config, tokenizer, 1, seed=0).next()
    assert plain.text == "add 1" and plain.tokens == [word("<s>"), word("add"), word("1")]


def test_prompts_that_cannot_be_rendered(tmp_path: Path, tokenizer: Any):
    def message(config: DataConfig) -> str:
        with pytest.raises(PreflightError) as caught:
            PromptStream(config, tokenizer, 1, seed=0)
        return str(caught.value)

    path = tmp_path / "c.jsonl"
    assert message(DataConfig(train=[source(path, "1", 17)])).startswith(f"{path}:2: the prompt is neither a string nor a list of messages")
    assert message(DataConfig(train=[source(path, "1", [{"role": "user"}])])).startswith(f"{path}:2: the prompt is neither")
    tool = [{"role": "tool", "content": "1"}]
    assert message(DataConfig(train=[source(path, "1", tool)])) == f"{path}:2: the model's chat template refuses it: no tools here"
    assert f"{path}:1: data.template=plain takes a string" in message(DataConfig(train=[source(path, tool)], template="plain"))


def test_tokenizer_folder_mistakes(tmp_path: Path, folder: str):
    absent = "no tokenizer in this folder; looked for tokenizer"
    for path, wanted in ((tmp_path / "none", "no such folder"), (tmp_path, absent), ("", "no such folder")):
        with pytest.raises(PreflightError, match=wanted):
            load_tokenizer(str(path))
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(PreflightError, match="its tokenizer does not load"):
        load_tokenizer(str(tmp_path))


def test_no_chat_template(tmp_path: Path, folder: str):
    bare = load_tokenizer(folder)
    bare.chat_template = None
    data = source(tmp_path / "d.jsonl", "1")
    with pytest.raises(PreflightError, match=r"set data\.template=plain"):
        PromptStream(DataConfig(train=[data]), bare, 1, seed=0)
    assert PromptStream(DataConfig(train=[data], template="plain"), bare, 1, seed=0).num_prompts == 1


def test_left_out_and_counted(tmp_path: Path, tokenizer: Any):
    data = source(tmp_path / "e.jsonl", "add 1", "", "  ", "add 1 2 3", "2")  # in tokens with <user> and <assistant>: 4, -, -, 6, 3
    stream = PromptStream(DataConfig(train=[data], max_prompt_tokens=4), tokenizer, 2, seed=0)
    assert stream.counts == {"train": {"read": 5, "empty": 2, "too_long": 1, "kept": 2, "heldout": 0}}
    assert sorted(ids(stream.next())) == [1, 5]
    with pytest.raises(PreflightError, match=r"no prompt to train on: 5 read, 2 empty, 3 longer than data\.max_prompt_tokens=2"):
        PromptStream(DataConfig(train=[data], max_prompt_tokens=2), tokenizer, 2, seed=0)


def test_every_epoch_is_a_new_order_of_everything(ten: SourceConfig, tokenizer: Any):
    stream = PromptStream(DataConfig(train=[ten]), tokenizer, 4, seed=3)
    seen = [number for _ in range(10) for number in ids(stream.next())]  # 40 prompts: four epochs
    epochs = [seen[i : i + 10] for i in range(0, 40, 10)]
    assert all(sorted(epoch) == list(range(1, 11)) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 4
    again = PromptStream(DataConfig(train=[ten]), tokenizer, 4, seed=3)  # another rank
    assert [number for _ in range(10) for number in ids(again.next())] == seen
    other = PromptStream(DataConfig(train=[ten]), tokenizer, 4, seed=4)
    assert [number for _ in range(10) for number in ids(other.next())] != seen


def test_file_order_without_shuffle(ten: SourceConfig, tokenizer: Any):
    stream = PromptStream(DataConfig(train=[ten], shuffle=False), tokenizer, 4, seed=0)
    assert [ids(stream.next()) for _ in range(4)] == [[1, 2, 3, 4], [5, 6, 7, 8], [9, 10, 1, 2], [3, 4, 5, 6]]


@pytest.mark.parametrize("size", [3, 7, 9, 10])
def test_no_prompt_twice_in_a_step(ten: SourceConfig, tokenizer: Any, size: int):
    for seed in range(20):
        stream = PromptStream(DataConfig(train=[ten]), tokenizer, size, seed=seed)
        steps = [ids(stream.next()) for _ in range(20)]
        assert all(len(set(step)) == size for step in steps)
        assert max(Counter(n for step in steps for n in step).values()) - min(Counter(n for step in steps for n in step).values()) <= 1


def test_set_smaller_than_a_step_wraps(ten: SourceConfig, tokenizer: Any):
    stream = PromptStream(DataConfig(train=[ten]), tokenizer, 25, seed=0)
    assert sorted(Counter(ids(stream.next())).values()) == [2] * 5 + [3] * 5
    assert sorted(Counter(ids(stream.next())).values()) == [2] * 5 + [3] * 5


def test_epochs_end_the_stream(ten: SourceConfig, tokenizer: Any):
    stream = PromptStream(DataConfig(train=[ten], epochs=2), tokenizer, 6, seed=0)  # 20 prompts: three steps of 6, two left over
    for _ in range(3):
        assert not stream.exhausted
        stream.next()
    assert stream.exhausted
    with pytest.raises(PreflightError, match=r"data\.epochs=1 of 10 prompts are fewer than the 25.*at least 3"):
        PromptStream(DataConfig(train=[ten], epochs=1), tokenizer, 25, seed=0)


@pytest.mark.parametrize("size", [4, 7, 25])
@pytest.mark.parametrize("taken", [0, 1, 2, 3, 5, 8])
def test_resume_continues_the_same(ten: SourceConfig, tokenizer: Any, size: int, taken: int):
    straight = PromptStream(DataConfig(train=[ten]), tokenizer, size, seed=5)
    for _ in range(taken):
        straight.next()
    state = json.loads(json.dumps(straight.state_dict()))
    resumed = PromptStream(DataConfig(train=[ten]), tokenizer, size, seed=5)
    resumed.load_state_dict(state)
    assert [straight.next() for _ in range(8)] == [resumed.next() for _ in range(8)]
    assert straight.state_dict() == resumed.state_dict()


def test_resume_with_changed_data_or_order_is_refused(tmp_path: Path, ten: SourceConfig, tokenizer: Any):
    state = PromptStream(DataConfig(train=[ten]), tokenizer, 4, seed=5).state_dict()
    with pytest.raises(PreflightError, match=r"run\.seed=6, but .* with run\.seed=5"):
        PromptStream(DataConfig(train=[ten]), tokenizer, 4, seed=6).load_state_dict(state)
    with pytest.raises(PreflightError, match=r"data\.shuffle=False, but"):
        PromptStream(DataConfig(train=[ten], shuffle=False), tokenizer, 4, seed=5).load_state_dict(state)
    shorter = SourceConfig(path=ten.path, limit=9)
    with pytest.raises(PreflightError, match="not those of the checkpoint: 10 then, 9 now"):
        PromptStream(DataConfig(train=[shorter]), tokenizer, 4, seed=5).load_state_dict(state)
    text = Path(ten.path).read_text()
    Path(ten.path).write_text(text.replace('"answer": 9', '"answer": 8'))  # one answer of one line
    with pytest.raises(PreflightError, match="not those of the checkpoint"):
        PromptStream(DataConfig(train=[ten]), tokenizer, 4, seed=5).load_state_dict(state)


def test_heldout_is_apart_even_from_copies(tmp_path: Path, tokenizer: Any):
    data = source(tmp_path / "f.jsonl", *(f"add {i % 25}" for i in range(100)))  # every prompt four times
    stream = PromptStream(DataConfig(train=[data], eval_fraction=0.2), tokenizer, 8, seed=1)
    heldout = {prompt.text for prompt in stream.eval_sets["heldout"]}
    trained = {prompt.text for _ in range(20) for prompt in stream.next()}
    assert len(stream.eval_sets["heldout"]) == 20 and stream.num_prompts == 80  # 5 of 25 texts, four times each
    assert not heldout & trained and len(heldout | trained) == 25
    assert stream.counts["train"] == {"read": 100, "empty": 0, "too_long": 0, "kept": 80, "heldout": 20}
    again = PromptStream(DataConfig(train=[data], eval_fraction=0.2), tokenizer, 8, seed=1)
    assert again.eval_sets == stream.eval_sets
    other = PromptStream(DataConfig(train=[data], eval_fraction=0.2), tokenizer, 8, seed=2)
    assert other.eval_sets != stream.eval_sets


def test_eval_sets_by_name_with_their_overlap(tmp_path: Path, ten: SourceConfig, tokenizer: Any, caplog: pytest.LogCaptureFixture):
    hard = source(tmp_path / "hard.jsonl", "add 5", "add 77")
    stream = PromptStream(DataConfig(train=[ten], eval=[hard]), tokenizer, 4, seed=0)
    assert [prompt.id for prompt in stream.eval_sets["hard"]] == ["hard:1", "hard:2"]
    assert stream.counts["hard"] == {"read": 2, "empty": 0, "too_long": 0, "kept": 2, "in_train": 1}
    assert caplog.messages == ["eval set hard: 1 of its 2 prompts are also trained on, flattering its accuracy"]
    with pytest.raises(PreflightError, match="eval set 'hard' has no usable prompt: 2 read, 0 empty, 2 longer"):
        PromptStream(DataConfig(train=[ten], eval=[hard], max_prompt_tokens=3), tokenizer, 4, seed=0)


def test_sources_are_joined_and_named_once(tmp_path: Path, ten: SourceConfig, tokenizer: Any):
    more = source(tmp_path / "more.jsonl", "add 50")
    stream = PromptStream(DataConfig(train=[ten, more], shuffle=False), tokenizer, 11, seed=0)
    assert [prompt.id for prompt in stream.next()] == [*(f"ten:{i}" for i in range(1, 11)), "more:1"]
    for config, wanted in (
        (DataConfig(train=[ten, ten]), "data.train: 2 sources are called 'ten'"),
        (DataConfig(train=[ten], eval=[SourceConfig(path=ten.path, name="heldout")]), "the name 'heldout' is taken"),
        (DataConfig(), "data.train is empty"),
    ):
        with pytest.raises(ConfigError, match=wanted):
            PromptStream(config, tokenizer, 4, seed=0)


def test_handed_out_prompts_are_the_callers_own(ten: SourceConfig, tokenizer: Any):
    stream = PromptStream(DataConfig(train=[ten], shuffle=False), tokenizer, 10, seed=0)
    first = stream.next()
    first[0].tokens.clear()
    assert stream.next()[0].tokens and type(first[1].tokens) is list
