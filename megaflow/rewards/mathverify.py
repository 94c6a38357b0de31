"""Mathematical equivalence, judged by the library math-verify (sets, intervals, equations, matrices, any spelling of an expression)."""

from __future__ import annotations

import logging
from typing import Any

from megaflow.types import ConfigError, Prompt

try:
    from math_verify import parse, verify
except ImportError as error:
    raise ConfigError(f"the reward math needs math-verify: pip install -e .[math] ({error})") from error

# Its own time-outs use SIGALRM, which gets in the way of others' signals; the pool's limit does their work. It warns that they are off.
logging.getLogger("math_verify").setLevel(logging.ERROR)


def equivalent(response: str, answer: Any, prompt: Prompt, float_rounding: int = 6, partial: float = 0.0) -> float:
    """1 if an expression found in the response equals the answer; numbers are compared after rounding to `float_rounding` places.

    `partial` for a response in which only other expressions are found.
    Raises ValueError when the answer holds nothing that math-verify can read.
    """
    text = str(answer)
    wanted = parse(text if "$" in text or r"\boxed" in text else f"${text}$", parsing_timeout=None)
    if not wanted:
        raise ValueError(f"math-verify finds no expression in the answer {answer!r}")
    given = parse(response, parsing_timeout=None)
    if verify(wanted, given, float_rounding=float_rounding, timeout_seconds=None):
        return 1.0
    return partial if given else 0.0


def found_expression(response: str, answer: Any, prompt: Prompt) -> str | None:
    """The expression that math-verify finds in the response, as it prints it."""
    given = parse(response, parsing_timeout=None)
    return str(given[0]) if given else None


equivalent.find_answer = found_expression
