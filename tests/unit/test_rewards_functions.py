"""The built-in reward functions, on values worked out by hand."""

from __future__ import annotations

from typing import Any

import pytest

from megaflow.rewards import REWARDS
from megaflow.types import ConfigError, Prompt

PROMPT = Prompt("set:1", [1], "question")


def reward(name: str, response: str, answer: Any, **options: Any) -> float:
    return REWARDS.get(name)(response, answer, PROMPT, **options)


def test_names():
    assert REWARDS.names() == ["boxed", "exact", "format", "math", "number", "reasoning_gym"]
    with pytest.raises(ConfigError, match="did you mean 'number'"):
        REWARDS.get("numbr")


def test_exact():
    assert reward("exact", " Paris\n", "Paris") == 1
    assert reward("exact", "paris", "Paris") == 0
    assert reward("exact", "paris", "Paris", ignore_case=True) == 1
    assert reward("exact", "42", 42) == 1
    assert reward("exact", "It is Paris", "Paris") == 0


def test_format():
    pattern = r"<think>.*</think>\s*<answer>.*</answer>"
    assert reward("format", "<think>a\nb</think>\n<answer>4</answer>\n", None, pattern=pattern) == 1
    assert reward("format", "well: <think>a</think><answer>4</answer>", None, pattern=pattern) == 0
    assert reward("format", "<think>a</think><answer>4</answer> there", None, pattern=pattern) == 0


@pytest.mark.parametrize(
    ("response", "answer"),
    [
        ("so 17 + 25 = 42", 42),
        ("The answer is 42.", "42"),
        ("It costs $1,234.50.", 1234.5),
        ("about 12,345,678 people", "12345678"),
        ("x = -7", -7),
        ("x = \N{MINUS SIGN}7", -7),
        ("+3", 3),
        ("12-7", 7),  # a difference, not a negative number
        ("(3)-7", 7),
        ("we get 3/4.", 0.75),
        ("we get 6/8", "3/4"),
        (".5", "1/2"),
        ("1.5e3 metres", 1500),
        ("2e-2", "0.02"),
        ("0.1", 0.1),  # a tenth exactly, not the nearest float
        ("1, 2, 3", 3),
        ("42.0", 42),
        ("7 for x2", 7),  # a digit inside a word is no number
        ("10", "first 4 and then 6 #### 10"),
    ],
)
def test_number_right(response: str, answer: Any):
    assert reward("number", response, answer) == 1


@pytest.mark.parametrize(
    ("response", "answer"),
    [
        ("42 or 43", 42),
        ("no idea", 42),
        ("", 42),
        ("-42", 42),
        ("1/0", 1),
        ("42.01", 42),
        ("1/3", 0.333),
        ("9" * 5000, 9),  # more digits than int() reads
        ("1e999999999", 1e9),  # would fill the memory
    ],
)
def test_number_wrong(response: str, answer: Any):
    assert reward("number", response, answer) == 0


def test_number_tolerance_is_absolute_and_inclusive():
    assert reward("number", "3.15", 3.14, tolerance=0.01) == 1
    assert reward("number", "3.1501", 3.14, tolerance=0.01) == 0
    assert reward("number", "1/3", 0.333, tolerance=0.001) == 1


def test_number_needs_a_number_to_compare_with():
    with pytest.raises(ValueError, match="the answer 'blue' holds no number"):
        reward("number", "1", "blue")


@pytest.mark.parametrize(
    ("response", "answer", "value"),
    [
        (r"thus \boxed{42}.", 42, 1),
        (r"\boxed{1} no, \boxed{2}", 2, 1),
        (r"\boxed{1} no, \boxed{2}", 1, 0),
        (r"\boxed{\frac{1}{2}}", "0.5", 1),
        (r"\boxed{\dfrac12}", "1/2", 1),
        (r"\boxed{-\frac{3}{4}}", -0.75, 1),
        (r"\boxed{1{,}000}", r"1{,}000", 1),
        (r"\boxed{x^{2} + 1}", "x^{2}+1", 1),
        (r"\boxed{\left( 3, \frac{\pi}{2} \right)}", r"(3,\dfrac{\pi}{2})", 1),
        (r"\boxed{\text{Tuesday}}", "Tuesday", 1),
        (r"\boxed{\{1, 2\}}", r"\{1,2\}", 1),
        (r"\boxed{\sqrt{\frac{a}{b}}}", r"so $\boxed{\sqrt{\frac{a}{b}}}$ it is", 1),
        (r"\boxed{42", 42, 0),  # never closed
        ("42", 42, 0),  # right, but without a box
        ("", 42, 0),
        (r"\boxed{x+1}", "1+x", 0),  # equivalence is the reward math's
    ],
)
def test_boxed(response: str, answer: Any, value: float):
    assert reward("boxed", response, answer) == value


def test_boxed_tolerance():
    assert reward("boxed", r"\boxed{3.15}", 3.14, tolerance=0.01) == 1
    assert reward("boxed", r"\boxed{3.15}", 3.14) == 0


@pytest.mark.parametrize(
    ("response", "answer", "value"),
    [
        (r"so \boxed{x+1}", "1+x", 1),
        (r"so $\frac{\sqrt{2}}{2}$", r"\frac{1}{\sqrt{2}}", 1),
        (r"\boxed{\{2, 1\}}", r"\{1,2\}", 1),
        ("The answer is 0.5", r"\frac{1}{2}", 1),
        (r"\boxed{x+2}", "1+x", 0),
        ("no idea", "7", 0),
    ],
)
def test_math(response: str, answer: Any, value: float):
    assert reward("math", response, answer) == value


def test_math_leaves_alarms_alone():
    """math-verify's own limits would set SIGALRM, which a handler of someone else's would then receive or lose."""
    import signal

    before = signal.signal(signal.SIGALRM, lambda *_: None)
    mine = signal.getsignal(signal.SIGALRM)
    signal.alarm(1000)
    try:
        assert reward("math", r"\boxed{7}", "7") == 1
        assert signal.getsignal(signal.SIGALRM) is mine and 0 < signal.alarm(0) <= 1000
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def test_reasoning_gym_gives_the_tasks_own_score():
    import reasoning_gym

    score = REWARDS.get("reasoning_gym")
    entry = reasoning_gym.create_dataset("chain_sum", size=1, seed=3, min_terms=3, max_terms=3)[0]
    prompt = Prompt("chain_sum:1", [1], entry["question"], entry["answer"], {"metadata": entry["metadata"]})
    right, wrong = entry["answer"], str(int(entry["answer"]) + 1)
    assert score(f"<answer>{right}</answer>", entry["answer"], prompt) == 1
    assert score(f"<answer>{wrong}</answer> then <answer> {right} </answer>", entry["answer"], prompt) == 1
    assert score(f"We add, and get {right}.", entry["answer"], prompt) == 1
    assert score(f"<answer>{wrong}</answer> {right}", entry["answer"], prompt) < 1
    assert score("", entry["answer"], prompt) < 1
    with pytest.raises(ValueError, match="prompt set:1 lacks reasoning-gym's metadata"):
        score("1", "1", PROMPT)


def test_reasoning_gym_accepts_another_right_answer():
    """countdown: any expression that reaches the target; here the one that the task made, its operands swapped by hand."""
    score = REWARDS.get("reasoning_gym")
    metadata = {"source_dataset": "countdown", "numbers": [2, 3, 4], "target": 14, "expression": "2 + 3*4"}
    prompt = Prompt("countdown:1", [1], "use 2, 3, 4 to make 14", "2 + 3*4", {"metadata": metadata})
    assert score("<answer>4*3 + 2</answer>", prompt.answer, prompt) == 1
    assert score("I would say:\n4*3 + 2", prompt.answer, prompt) == 1  # no tags: the last line
    assert score("<answer>4*3 - 2</answer>", prompt.answer, prompt) < 1
