r"""The content of the last \boxed{...}, compared as a number or as normalised LaTeX."""

from __future__ import annotations

import re
from typing import Any

from megaflow.rewards.number import close, read_whole
from megaflow.types import Prompt

_SPACES = re.compile(r"\\[,!;: ]|\\quad|~|\s")
_WORDS = re.compile(r"\\(?:text|mathrm|mathbf|textbf)\s*\{([^{}]*)\}")
_FRACTION = re.compile(r"\\[dt]?frac\{(-?\d+)\}\{(\d+)\}|\\[dt]?frac(\d)(\d)")


def boxed(response: str, answer: Any, prompt: Prompt, tolerance: float = 0.0, partial: float = 0.0) -> float:
    r"""1 if the content of the response's last \boxed{...} equals the answer (or the answer's own last \boxed{...}).

    Both numbers: within `tolerance` (absolute); else equal after `normalise`. `partial` for a box with something else; no complete box: 0.
    """
    given = last_boxed(response)
    if given is None:
        return 0.0
    wanted = last_boxed(str(answer))
    given, wanted = normalise(given), normalise(str(answer) if wanted is None else wanted)
    numbers = read_whole(given), read_whole(wanted)
    if numbers[0] is not None and numbers[1] is not None:
        return 1.0 if close(numbers[0], numbers[1], tolerance) else partial
    return 1.0 if given == wanted else partial


def boxed_answer(response: str, answer: Any, prompt: Prompt) -> str | None:
    """The content of the last box, one spelling for equal numbers."""
    given = last_boxed(response)
    if given is None:
        return None
    number = read_whole(normalise(given))
    return normalise(given) if number is None else str(number)


boxed.find_answer = boxed_answer


def last_boxed(text: str) -> str | None:
    r"""What stands in the last \boxed{...}, with the braces nested in it; None without one, or when it is never closed."""
    start = text.rfind(r"\boxed{")
    if start < 0:
        return None
    begin, depth = start + len(r"\boxed{"), 1
    for end in range(begin, len(text)):
        if text[end - 1] != "\\":  # \{ and \} are printed braces
            depth += {"{": 1, "}": -1}.get(text[end], 0)
        if depth == 0:
            return text[begin:end]
    return None


def normalise(latex: str) -> str:
    r"""One spelling of the same formula: no spaces, $, \left, \right, \text; \dfrac{1}{2} and \frac12 as 1/2; no full stop at the end."""
    text = _WORDS.sub(r"\1", latex).replace("$", "").replace(r"\left", "").replace(r"\right", "")
    text = _SPACES.sub("", text).removesuffix(".")
    text = _FRACTION.sub(lambda found: f"{found[1] or found[3]}/{found[2] or found[4]}", text)
    return text.replace(r"\dfrac", r"\frac").replace(r"\tfrac", r"\frac").replace(r"\%", "%")
