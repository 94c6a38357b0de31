"""Numbers in text: found, read exactly (as fractions, so 0.1 is one tenth), compared."""

from __future__ import annotations

import re
from fractions import Fraction
from typing import Any

from megaflow.types import Prompt

# A sign counts only where no operand stands before it ("12-7" holds 12 and 7); digits inside a word ("x2") are no number.
_UNSIGNED = r"(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?|\.\d+"
_NUMBER = re.compile(rf"(?<![\w.])(?:(?<![)\]])[-+])?(?:{_UNSIGNED})(?:[eE][-+]?\d{{1,3}}(?!\d))?(?:/\d+(?!\d|\.\d))?", re.ASCII)
MAX_DIGITS = 400  # a model may write digits or exponents without end; beyond this it is not a number that anyone asked for


def last_number(response: str, answer: Any, prompt: Prompt, tolerance: float = 0.0, partial: float = 0.0) -> float:
    """1 if the last number in the response is within `tolerance` (absolute) of the last number in the answer ("... #### 42" is 42).

    `partial` for any other number. Reads signs, thousands' commas, decimals, exponents and fractions. Raises ValueError when the answer
    holds no number.
    """
    wanted = find_last(str(answer))
    if wanted is None:
        raise ValueError(f"the answer {answer!r} holds no number")
    given = find_last(response)
    if given is None:
        return 0.0
    return 1.0 if close(given, wanted, tolerance) else partial


last_number.find_answer = lambda response, answer, prompt: find_last(response)


def find_last(text: str) -> Fraction | None:
    """The last number in the text, exactly."""
    found = _NUMBER.findall(text.replace("\N{MINUS SIGN}", "-"))
    return _value(found[-1]) if found else None


def read_whole(text: str) -> Fraction | None:
    """The number that the text is, white space aside; None if it is anything else."""
    match = _NUMBER.fullmatch(text.strip().replace("\N{MINUS SIGN}", "-"))
    return _value(match.group()) if match else None


def close(a: Fraction, b: Fraction, tolerance: float) -> bool:
    return abs(a - b) <= Fraction(str(tolerance))  # 0.1 means one tenth


def _value(number: str) -> Fraction | None:
    if len(number) > MAX_DIGITS:
        return None
    top, _, bottom = number.replace(",", "").partition("/")
    divisor = Fraction(bottom) if bottom else Fraction(1)
    return Fraction(top) / divisor if divisor else None
