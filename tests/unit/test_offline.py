"""Stored samples: what generate keeps of a prompt's samples, what a reader makes of lines, what a step takes; and what is refused."""

from __future__ import annotations

import dataclasses
import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

from megaflow.config.checks import check
from megaflow.config.loading import load
from megaflow.config.schema import Config, GenerateConfig, OfflineConfig
from megaflow.data.stored import StoredSamples
from megaflow.trainer import offline
from megaflow.trainer.chunks import ChunkedOutput
from megaflow.trainer.samples import write_samples
from megaflow.trainer.selection import KINDS, first_of_each, stored_line
from megaflow.types import ConfigError, PreflightError, Prompt, Sample
from tools.make_tiny_model import make

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("model")
    make(folder)
    return str(folder)


@pytest.fixture(scope="module")
def tokenizer(model: str) -> Any:
    from megaflow.data import load_tokenizer

    return load_tokenizer(model)


def group(*responses: tuple[str, float], id: str = "sums:1", number: int = 0) -> list[Sample]:
    """(text, reward) of each; tokens are made up."""
    prompt = Prompt(id, [5, 6], f"question {id}", answer=3, meta={"level": 2})
    return [
        Sample(prompt, number, i, torch.tensor([7 + i, 2]), torch.tensor([-0.1, -1 / 3]), "stop", 4, text=text, reward=reward)
        for i, (text, reward) in enumerate(responses)
    ]


# --- what generate keeps -----------------------------------------------------------------------------------------------------------


def chosen(kind: str, samples: list[Sample], **settings: Any) -> list[dict[str, Any]]:
    return KINDS[kind](samples, GenerateConfig(kind=kind, **settings), 0.7)  # type: ignore[arg-type]


def test_kinds() -> None:
    four = group(("a", 0.0), ("b", 1.0), ("c", 1.0), ("b", 1.0))
    assert [line["response"] for line in chosen("samples", four)] == ["a", "b", "c", "b"]
    (best,) = chosen("best_of_n", four)
    assert (best["response"], best["index"], best["of"], best["reward"]) == ("b", 1, 4, 1.0)
    assert [line["response"] for line in chosen("sft", four, per_prompt=5)] == ["b", "c"]  # each text once
    assert [line["response"] for line in chosen("sft", four)] == ["b"] and chosen("sft", four, threshold=1.1) == []
    (pair,) = chosen("pairs", four, margin=1.0)
    assert (pair["chosen"], pair["rejected"], pair["margin"], pair["chosen_ids"], pair["rejected_ids"]) == ("b", "a", 1.0, [8, 2], [7, 2])
    assert chosen("pairs", four, margin=1.01) == [] and "response" not in pair
    assert chosen("pairs", group(("a", 1.0), ("b", 1.0)), margin=0.1) == []


def test_the_same_question_twice_is_imitated_once() -> None:
    lines = [*chosen("sft", group(("b", 1.0))), *chosen("sft", group(("b", 1.0))), *chosen("sft", group(("b", 1.0), id="sums:2"))]
    assert [line["id"] for line in filter(first_of_each(), lines)] == ["sums:1", "sums:2"]


def test_a_line_gives_every_number_back() -> None:
    (sample,) = group(("b", 1.0))
    line = json.loads(json.dumps(stored_line(sample, 0.7)))
    assert torch.equal(torch.tensor(line["rollout_logp"]), sample.rollout_logp)
    names = ("prompt_ids", "response_ids", "version", "temperature", "meta")
    assert [line[name] for name in names] == [[5, 6], [7, 2], 4, 0.7, {"level": 2}]


# --- the file that survives a kill -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ending", ["jsonl", "parquet"])
def test_chunks_are_joined_in_order_whatever_the_order_they_were_made_in(tmp_path: Path, ending: str) -> None:
    path = tmp_path / f"out.{ending}"
    first = ChunkedOutput(path, {"generate.samples": 8})
    first.write(1, [{"prompt": "c", "answer": "3"}])
    first._lock.close()  # as a kill does
    again = ChunkedOutput(path, {"generate.samples": 8})
    assert again.done() == {1} and not path.exists()
    again.write(0, [{"prompt": "a", "answer": 1}, {"prompt": "b", "answer": None}])
    again.write(2, [])
    assert again.finish(3, {"step": 0}) == 3
    if ending == "jsonl":
        assert [json.loads(line)["prompt"] for line in path.read_text().splitlines()] == ["a", "b", "c"]
    else:
        import pyarrow.parquet

        rows = pyarrow.parquet.read_table(path).to_pylist()
        assert [(r["prompt"], json.loads(r["answer_json"])) for r in rows] == [("a", 1), ("b", None), ("c", "3")]
    assert sorted(p.name for p in tmp_path.iterdir()) == [f"out.{ending}", f"out.{ending}.json"]
    with pytest.raises(ConfigError, match="is finished; delete it"):
        ChunkedOutput(path, {"generate.samples": 8})


def test_other_settings_or_prompts_are_refused_with_the_difference(tmp_path: Path) -> None:
    first = ChunkedOutput(tmp_path / "out.jsonl", {"generate.samples": 8, "run.seed": 0})
    first.same_data("abc")
    first._lock.close()
    with pytest.raises(ConfigError, match=r"other settings:\n  generate.samples: 8 -> 4\n"):
        ChunkedOutput(tmp_path / "out.jsonl", {"generate.samples": 4, "run.seed": 0})
    again = ChunkedOutput(tmp_path / "out.jsonl", {"generate.samples": 8, "run.seed": 0})
    again.same_data("abc")
    with pytest.raises(ConfigError, match="the prompts have changed"):
        again.same_data("abd")


# --- what a reader makes of it -----------------------------------------------------------------------------------------------------


def write(path: Path, lines: list[dict[str, Any]]) -> str:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return str(path)


def stored(path: str, objective: str, tokenizer: Any) -> StoredSamples:
    return StoredSamples(path, objective, Config().data, tokenizer, seed=0)  # type: ignore[arg-type]


@pytest.mark.parametrize("ending", ["jsonl", "parquet"])
def test_samples_come_back_as_they_were(tmp_path: Path, tokenizer: Any, ending: str) -> None:
    before = group(("a", 0.0), ("b", 1.0)) + group(("c", 1.0), ("d", 0.0), id="sums:2", number=1)
    output = ChunkedOutput(tmp_path / f"out.{ending}", {})
    output.write(0, [stored_line(s, 1.0) for s in before])
    output.finish(1, {})
    found = stored(str(output.path), "rl", tokenizer)
    assert [len(unit) for unit in found.units] == [2, 2] and found.counts["no_logp"] == 0 and found.temperatures == {1.0}
    for s, expected in zip((s for unit in found.units for s in unit), before, strict=True):
        assert s.prompt == expected.prompt and torch.equal(s.response, expected.response)
        assert torch.equal(s.rollout_logp, expected.rollout_logp) and (s.finish, s.version, s.text) == ("stop", 4, expected.text)


def test_samples_of_a_run_have_text_only(tmp_path: Path, tokenizer: Any) -> None:
    """Put into tokens again, the end token with them; groups of two steps are apart although the prompt is the same."""
    text = "<|im_start|>user\nWhat is 1 + 2?<|im_end|>\n<|im_start|>assistant\n"
    prompt = Prompt("sums:1", tokenizer(text).input_ids, text, answer="3")
    for step, responses in ((9, ["3", "4"]), (10, ["3", "12"])):
        made = [tokenizer(r).input_ids + [tokenizer.eos_token_id] for r in responses]
        samples = [Sample(prompt, 0, i, torch.tensor(ids), None, "stop", step, text=responses[i]) for i, ids in enumerate(made)]
        write_samples(tmp_path, step, samples, -1)
    found = stored(str(tmp_path), "rl", tokenizer)
    assert [[s.text for s in unit] for unit in found.units] == [["3", "4"], ["3", "12"]] and found.counts["no_logp"] == 4
    assert found.units[1][1].response.tolist() == made[1] and found.units[1][1].prompt == prompt and found.units[1][1].version == 10


def test_lines_of_ones_own(tmp_path: Path, tokenizer: Any) -> None:
    lines = [{"prompt": "What is 1 + 2?", "chosen": "3", "rejected": "4"}]
    ((good, bad),) = stored(write(tmp_path / "mine.jsonl", lines), "dpo", tokenizer).units
    templated = tokenizer.apply_chat_template([{"role": "user", "content": "What is 1 + 2?"}], add_generation_prompt=True, tokenize=False)
    assert good.prompt.text == templated and good.prompt.tokens == bad.prompt.tokens == tokenizer(templated).input_ids
    assert good.response.tolist() == [*tokenizer("3").input_ids, tokenizer.eos_token_id] and bad.text == "4"


@pytest.mark.parametrize(
    ("objective", "line", "message"),
    [
        ("dpo", {"prompt": "a", "response": "b"}, "mine.jsonl:1: offline.objective=dpo needs a text `chosen`.*this is a sample"),
        ("sft", {"prompt": "a", "chosen": "b", "rejected": "c"}, "needs a text `response` in each line, and this is a pair"),
        ("rl", {"prompt": "a", "response": "b", "response_ids": [4, 5], "rollout_logp": [0.1]}, "1 log-probabilities for 2 response"),
        ("sft", {"prompt": "a", "response": "", "finish": "length"}, "mine.jsonl:1: its response is empty"),
    ],
)
def test_lines_that_do_not_fit(tmp_path: Path, tokenizer: Any, objective: str, line: dict[str, Any], message: str) -> None:
    with pytest.raises(PreflightError, match=message):
        stored(write(tmp_path / "mine.jsonl", [line]), objective, tokenizer)


def test_every_unit_once_an_epoch_in_an_order_that_depends_on_nothing_but_seed_and_epoch(tmp_path: Path, tokenizer: Any) -> None:
    path = write(tmp_path / "mine.jsonl", [{"prompt": f"{i}", "response": f"{i}"} for i in range(10)])
    store = stored(path, "sft", tokenizer)
    taken = [[s.text for s in store.step(step, 4)] for step in range(1, 6)]
    flat = [text for step in taken for text in step]
    assert Counter(flat[:10]) == Counter(flat[10:]) == Counter(map(str, range(10))) and flat[:10] != flat[10:]
    assert [s.text for s in stored(path, "sft", tokenizer).step(4, 4)] == taken[3]  # as after a resume
    assert [(s.group, s.index) for s in store.step(3, 4)] == [(0, 0), (1, 0), (2, 0), (3, 0)] and store.epoch(5, 4) == 2.0


# --- what fits the objective -------------------------------------------------------------------------------------------------------


def opened(model: str, path: str, **settings: Any) -> list[str]:
    cfg = Config()
    parts = {"data": {"rollouts": path}, "model": {"path": model}, "offline": {"steps": 2, **settings.pop("offline", {})}, **settings}
    cfg = dataclasses.replace(cfg, **{name: dataclasses.replace(getattr(cfg, name), **values) for name, values in parts.items()})
    return offline._open(cfg, [])


def test_behaviour_that_is_not_known_is_refused_or_said(tmp_path: Path, model: str) -> None:
    bare = write(tmp_path / "bare.jsonl", [{"prompt": "a", "response": "b"}])
    with pytest.raises(ConfigError, match="1 of 1 samples have no `rollout_logp`.*missing_logp=recompute"):
        opened(model, bare)
    notices = "\n".join(opened(model, bare, offline={"missing_logp": "recompute"}))
    assert "1 samples count as on-policy" in notices and "correction.mode=none" in notices and "up to step 2, then online" in notices
    warm = write(tmp_path / "warm.jsonl", [{**stored_line(group(("b", 1.0))[0], 0.7)}])
    with pytest.raises(ConfigError, match="drawn at temperature 0.7, and sampling.temperature=1"):
        opened(model, warm)
    assert len(opened(model, warm, sampling={"temperature": 0.7}, run={"steps": 2})) == 2


THREE = ["data.rollouts=setup.py", "offline.steps=3"]


def complaints(arguments: list[str], purpose: str = "train") -> str:
    sound = ["model.path=m", "data.train=[{path: t.jsonl}]", "reward.functions=[{name: exact}]"]
    with pytest.raises(ConfigError) as caught:
        check(load(None, sound + arguments), 1, purpose=purpose)
    return str(caught.value)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["offline.steps=3"], "offline.steps=3 learn from stored data, and data.rollouts is not set"),
        (["data.rollouts=setup.py"], "data.rollouts=setup.py is read in the first offline.steps steps, and offline.steps=0"),
        (["data.rollouts=nowhere.jsonl", "offline.steps=3"], "data.rollouts=nowhere.jsonl: no such file or folder"),
        (["data.rollouts=setup.py", "offline.steps=300"], "offline.steps=300 is beyond run.steps=100"),
        ([*THREE, "offline.objective=sft", "sampling.temperature=0.5"], "sampling.temperature=0.5 is another"),
        ([*THREE, "offline.objective=dpo", "actor.epochs=2"], "actor.epochs must be 1, not 2"),
        ([*THREE, "offline.objective=dpo", "actor.mini_batch=1"], "actor.mini_batch=1 must be even"),
    ],
)
def test_contradictions(arguments: list[str], message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    assert message in complaints(arguments)


def test_contradictions_of_generate() -> None:
    assert "nothing is learned from stored data" in complaints([], "offline")
    assert "draws the same response generate.samples=8 times" in complaints(["sampling.temperature=0"], "generate")
    assert "chooses among the samples" in complaints(["generate.kind=pairs", "generate.samples=1"], "generate")
    assert "must end in .parquet" in complaints(["generate.output=a.jsonl", "generate.format=parquet"], "generate")


@pytest.mark.parametrize("name", ["sft", "dpo"])
def test_recipes_go_over_a_configuration(name: str, tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text(f"base: [{ROOT}/yaml/quickstart.yaml, {ROOT}/yaml/recipes/{name}.yaml]\n")
    loaded = load(str(file), ["offline.steps=5", f"data.rollouts={tmp_path}"])
    check(loaded, world_size=2, purpose="offline")
    published = {"sft": OfflineConfig(5, "sft", 64), "dpo": OfflineConfig(5, "dpo", 64, beta=0.1, dpo_loss="sigmoid", label_smoothing=0.0)}
    assert loaded.config.offline == published[name]
