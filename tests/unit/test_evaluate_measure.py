"""pass@k, avg@n and maj@n of an evaluation, by hand, through real reward workers; and what functions call the answer of a response."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from megaflow.config.schema import Config, EvalConfig, RewardConfig, RewardFunctionConfig
from megaflow.rewards import REWARDS, RewardPool
from megaflow.trainer.evaluate import measure
from megaflow.types import Prompt, Sample

ANSWERS = {  # prompt's answer -> four responses
    "7": ["it is 7", "7.0", "so 3", "3"],  # 2 of 4; 7 and 3 have two votes each
    "5": ["5", "6", "6.0", "none"],  # 1 of 4; 6 wins
    "9": ["9", "18/2", "+9", "9"],  # 4 of 4
}


def samples(number: int) -> list[Sample]:
    return [
        Sample(Prompt(f"s:{g}", [1], "?", answer), g, i, None, None, "stop", 0, text=text)
        for g, (answer, texts) in enumerate(ANSWERS.items())
        for i, text in enumerate(texts[:number])
    ]


def settings(function: str, **evaluation) -> Config:
    functions = [RewardFunctionConfig(function, options={} if function == "number" else {"pattern": r"[\d.]+"})]
    return Config(reward=RewardConfig(functions=functions, workers=1), eval=EvalConfig(**evaluation))


def test_of_several_samples():
    cfg = settings("number", samples=4, temperature=1.0)
    with RewardPool(cfg.reward) as pool:
        found = measure(samples(4), pool, cfg)
        chosen = measure(samples(4), pool, settings("number", samples=4, pass_k=[3]))
        single = measure(samples(1), pool, settings("number"))
    assert found == pytest.approx(
        {
            "accuracy": 7 / 12,
            "reward": 7 / 12,
            "pass@1": 7 / 12,
            "pass@2": (5 / 6 + 1 / 2 + 1) / 3,  # 1 - C(2,2)/C(4,2), 1 - C(3,2)/C(4,2), 1
            "pass@4": 1.0,
            "avg@4": 7 / 12,
            "maj@4": (0.5 + 0 + 1) / 3,
        }
    )
    assert [name for name in chosen if name.startswith("pass@")] == ["pass@3"]
    assert chosen["pass@3"] == pytest.approx((1 + 3 / 4 + 1) / 3)  # 1 - C(3,3)/C(4,3)
    assert single == {"accuracy": 1.0, "reward": 1.0}


def test_a_function_that_cannot_tell_answers_has_no_vote():
    cfg = settings("format", samples=4)
    with RewardPool(cfg.reward) as pool:
        assert not pool.tells_answers
        assert not any(name.startswith("maj@") for name in measure(samples(4), pool, cfg))


def test_what_counts_as_solved():
    """With part credit, a response of less than reward.solved is none."""
    functions = [RewardFunctionConfig("number", options={"partial": 0.25})]
    made = samples(4)
    for solved, avg in ((1.0, 7 / 12), (0.25, 11 / 12)):
        cfg = Config(reward=RewardConfig(functions=functions, workers=1, solved=solved), eval=EvalConfig(samples=4))
        with RewardPool(cfg.reward) as pool:
            found = measure(made, pool, cfg)
        assert found["accuracy"] == pytest.approx((7 + 4 * 0.25) / 12) and found["avg@4"] == pytest.approx(avg)


@pytest.mark.parametrize(
    ("name", "same", "other", "none"),
    [
        ("number", ["it is 1,234.50", "2469/2", "x = 1234.5"], "1234", "no number"),
        ("boxed", [r"\boxed{0.5}", r"so \boxed{\frac12}", r"\boxed{1/2} "], r"\boxed{x}", "0.5"),
        ("exact", [" Paris", "Paris\n"], "Rome", " "),
        ("reasoning_gym", ["<answer>a</answer>", "b <answer> a </answer>"], "<answer>b</answer>", ""),
        ("math", ["$x^2 + 1$", "the result is $1 + x^2$"], "$x^2$", ""),
    ],
)
def test_equal_answers_are_spelt_the_same(name: str, same: list[str], other: str, none: str):
    if name == "math":
        pytest.importorskip("math_verify")
    prompt = SimpleNamespace(id="s:1", meta={})
    found = [REWARDS.get(name).find_answer(text, "a", prompt) for text in (*same, other, none)]
    texts = [None if each is None else str(each) for each in found]
    assert len(set(texts[: len(same)])) == 1 and texts[-2] not in (None, texts[0]) and texts[-1] is None


def test_part_credit():
    prompt = SimpleNamespace(id="s:1", meta={})
    number, boxed = REWARDS.get("number"), REWARDS.get("boxed")
    assert [number(text, "7", prompt, partial=0.1) for text in ("7", "8", "seven")] == [1.0, 0.1, 0.0]
    assert [boxed(text, "x", prompt, partial=0.2) for text in (r"\boxed{x}", r"\boxed{y}", r"\boxed{y", "x")] == [1.0, 0.2, 0.0, 0.0]
    assert [boxed(text, "7", prompt, partial=0.2) for text in (r"\boxed{7.0}", r"\boxed{8}")] == [1.0, 0.2]
