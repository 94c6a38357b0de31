"""Pass rates, what they do to the order of prompts, and sources mixed by weight."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import pytest

from megaflow.config.schema import DataConfig, SourceConfig
from megaflow.data import PromptStream
from megaflow.data.order import Draws, shares
from megaflow.data.pass_rates import PassRates
from megaflow.types import PreflightError


class Words:
    """Stands in for a tokenizer."""

    chat_template = "x"

    def apply_chat_template(self, messages, **_):
        return messages[-1]["content"]

    def __call__(self, texts, **_):
        return SimpleNamespace(input_ids=[[1] for _ in texts])


def source(path: Path, count: int, weight: float = 0.0, **columns: list) -> SourceConfig:
    rows = [{"prompt": f"{path.stem} {i}", "answer": "", **{k: v[i] for k, v in columns.items()}} for i in range(count)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return SourceConfig(path=str(path), weight=weight)


def lines(prompts) -> list[int]:
    return [int(p.id.split(":")[1].split("#")[0]) for p in prompts]


def test_running_pass_rate_by_hand():
    rates = PassRates(0.5, {3: 0.25})
    assert (rates.rate(3), rates.rate(7), rates.mean()) == (0.25, 0.5, 0.25)
    rates.record(3, 1.0)
    rates.record(7, 0.0)
    assert (rates.rate(3), rates.rate(7)) == (0.625, 0.0)
    rates.record(7, 1.0)
    rates.record(7, 1.0)
    assert rates.rate(7) == 0.75 and rates.solved(2) == {7} and rates.solved(3) == set() and rates.solved(0) == set()
    rates.record(7, 0.5)
    assert rates.solved(1) == {3}
    again = PassRates(0.5, {})
    again.load_state_dict(json.loads(json.dumps(rates.state_dict())))
    assert again.records == rates.records


def test_worth_is_highest_at_the_target():
    rates = PassRates(0.0, {0: 0.5, 1: 1.0, 2: 0.0, 3: 0.75})
    assert [rates.worth(i, 0.5) for i in (0, 1, 2, 3, 99)] == [1.0, 0.05, 0.05, 0.5, 1.0]
    assert rates.worth(0, 0.8) == pytest.approx(1 - 0.3 / 0.8)


def test_easy_to_hard_sorts_each_epoch_by_pass_rate(tmp_path: Path):
    data = source(tmp_path / "a.jsonl", 6, rate=[0.1, 0.9, None, 0.4, 1.0, 0.0])
    config = DataConfig(train=[data], curriculum="easy_to_hard", pass_rate_key="rate")
    stream = PromptStream(config, Words(), 3, seed=0)
    assert lines(stream.next() + stream.next()) == [5, 2, 3, 4, 1, 6]  # 1.0 0.9 unknown 0.4 0.1 0.0
    again = PromptStream(config, Words(), 6, seed=0)
    again.next()
    for prompt_id, rate in (("a:6", 1.0), ("a:5", 0.0), ("a:4", 1.0)):  # half old, half new: 0.5, 0.5, 0.7
        again.record(prompt_id, rate, rate)
    found = lines(again.next())
    assert found[:2] == [2, 4] and set(found[2:5]) == {3, 5, 6} and found[5] == 1


def test_target_draws_by_worth_and_without_repeats():
    draws = Draws([0, 1, 2, 3], "s", lambda index: (8.0, 4.0, 2.0, 2.0)[index])
    counts = Counter(draws.take(1, set())[0] for _ in range(4000))
    assert [counts[i] / 4000 for i in range(4)] == pytest.approx([0.5, 0.25, 0.125, 0.125], abs=0.03)
    assert all(sorted(draws.take(4, set())) == [0, 1, 2, 3] for _ in range(5))
    assert set(draws.take(2, {0, 1})) == {2, 3} and Counter(draws.take(6, set())).most_common()[-1][1] == 1
    assert draws.epoch == (4000 + 20 + 2 + 6) // 4


def test_solved_prompts_are_left_out_while_there_are_enough_others(tmp_path: Path):
    config = DataConfig(train=[source(tmp_path / "a.jsonl", 6)], shuffle=False, skip_solved=2, epochs=4)
    stream = PromptStream(config, Words(), 2, seed=0)
    for prompt_id in ("a:1", "a:4"):
        stream.record(prompt_id, 1.0, 1.0)
        stream.record(prompt_id, 1.0, 1.0)
    assert stream.left == 16 and stream.stats()["data/skipped"] == 2
    assert [lines(stream.next()) for _ in range(3)] == [[2, 3], [5, 6], [2, 3]]
    stream.record("a:4", 0.5, 0.5)
    assert lines(stream.next()) == [4, 5]
    for prompt_id in ("a:2", "a:3", "a:4", "a:5", "a:6"):
        stream.record(prompt_id, 1.0, 1.0)
        stream.record(prompt_id, 1.0, 1.0)
    assert lines(stream.next()) == [6, 1]  # all are solved: nothing is left out


def test_sources_are_mixed_by_their_weights(tmp_path: Path):
    config = DataConfig(train=[source(tmp_path / "a.jsonl", 50, 3.0), source(tmp_path / "b.jsonl", 4, 1.0)], epochs=2)
    stream = PromptStream(config, Words(), 8, seed=1)
    names = [Counter(p.id.partition(":")[0] for p in stream.next()) for _ in range(6)]
    assert names == [{"a": 6, "b": 2}] * 6
    assert stream.left == 2 * 54 - 48 and stream.epoch == 0
    for _ in range(7):
        stream.next()
    assert stream.epoch == 1 and stream.exhausted
    with pytest.raises(PreflightError, match="'c' has a weight and no usable prompt"):
        PromptStream(DataConfig(train=[config.train[0], source(tmp_path / "c.jsonl", 0, 1.0)]), Words(), 4, seed=0)


@pytest.mark.parametrize("weights", [[1.0, 1.0], [5.0, 1.0, 1.0], [0.7, 0.2, 0.1], [1e-3, 1.0]])
def test_shares_stay_near_their_weights(weights: list[float]):
    handed = [0] * len(weights)
    for _ in range(300):
        handed[shares(weights, handed, 1)[0]] += 1
        assert all(abs(handed[i] - sum(handed) * w / sum(weights)) <= 1.0 for i, w in enumerate(weights))
    assert shares(weights, [0] * len(weights), 300).count(0) == handed[0]


@pytest.mark.parametrize("curriculum", ["none", "easy_to_hard", "target"])
@pytest.mark.parametrize("weight", [0.0, 2.0])
def test_resume_goes_on_the_same(tmp_path: Path, curriculum: str, weight: float):
    train = [source(tmp_path / "a.jsonl", 9, weight), source(tmp_path / "b.jsonl", 5, weight / 2)]
    config = DataConfig(train=train, curriculum=curriculum, skip_solved=2)

    def steps(stream: PromptStream, first: int, last: int) -> list[list[str]]:
        found = []
        for number in range(first, last):
            prompts = stream.next(4 if number % 3 else 7)
            for position, prompt in enumerate(prompts):
                stream.record(prompt.id, ((position + number) % 4 + 1) / 4, 0.0)
            found.append([prompt.id for prompt in prompts])
        return found

    straight, first, second = (PromptStream(config, Words(), 4, seed=5) for _ in range(3))
    wanted = steps(straight, 0, 14)
    steps(first, 0, 6)
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    assert steps(second, 6, 14) == wanted[6:]
    assert second.state_dict() == straight.state_dict()


def test_another_curriculum_or_weight_is_refused_on_resume(tmp_path: Path):
    train = [source(tmp_path / "a.jsonl", 9, 1.0), source(tmp_path / "b.jsonl", 5, 1.0)]
    state = PromptStream(DataConfig(train=train), Words(), 4, seed=5).state_dict()
    with pytest.raises(PreflightError, match=r"data\.curriculum=target, but .* data\.curriculum=none"):
        PromptStream(DataConfig(train=train, curriculum="target"), Words(), 4, seed=5).load_state_dict(state)
    changed = [train[0], SourceConfig(path=train[1].path, weight=2.0)]
    with pytest.raises(PreflightError, match=r"data\.train\.1\.weight=2\.0, but"):
        PromptStream(DataConfig(train=changed), Words(), 4, seed=5).load_state_dict(state)


def test_pass_rates_that_are_none(tmp_path: Path):
    data = source(tmp_path / "a.jsonl", 2, rate=[0.5, 1.5])
    with pytest.raises(PreflightError, match=r"prompt a:2: its pass rate \(data\.pass_rate_key=rate\) is 1\.5"):
        PromptStream(DataConfig(train=[data], pass_rate_key="rate"), Words(), 1, seed=0)
    with pytest.raises(PreflightError, match="no training prompt has this column"):
        PromptStream(DataConfig(train=[data], pass_rate_key="rates"), Words(), 1, seed=0)


def test_a_prompt_that_comes_twice_in_a_batch_has_two_ids_and_one_pass_rate(tmp_path: Path):
    stream = PromptStream(DataConfig(train=[source(tmp_path / "a.jsonl", 2)], shuffle=False), Words(), 5, seed=0)
    prompts = stream.next()
    assert [p.id for p in prompts] == ["a:1", "a:2", "a:1#2", "a:2#2", "a:1#3"]
    stream.record("a:1#3", 1.0, 1.0)
    assert stream.rates.rate(0) == 1.0 and stream.prompt("a:1#3") == prompts[4]
