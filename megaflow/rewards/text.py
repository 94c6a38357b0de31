"""Rewards that look at the text alone."""

from __future__ import annotations

import re
from typing import Any

from megaflow.types import Prompt


def exact(response: str, answer: Any, prompt: Prompt, ignore_case: bool = False) -> float:
    """1 if the response is the answer, white space around both aside."""
    given, wanted = response.strip(), str(answer).strip()
    return float(given.casefold() == wanted.casefold() if ignore_case else given == wanted)


exact.find_answer = lambda response, answer, prompt: response.strip() or None


def format_matches(response: str, answer: Any, prompt: Prompt, pattern: str) -> float:
    """1 if the whole response, white space around it aside, matches the regular expression `pattern`; `.` matches newlines too."""
    return float(re.fullmatch(pattern, response.strip(), re.DOTALL) is not None)
