"""The scorers of reasoning-gym's tasks, which accept every right answer and not just the one that the task made."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from megaflow.rewards.number import find_last, read_whole
from megaflow.types import ConfigError, Prompt

try:
    from reasoning_gym.factory import get_score_answer_fn
    from reasoning_gym.utils import extract_answer
except ImportError as error:
    raise ConfigError(f"the reward reasoning_gym needs the package reasoning-gym: pip install reasoning-gym ({error})") from error

scorer: Callable[[str], Callable[..., float]] = functools.cache(get_score_answer_fn)  # making one can take a second for some tasks


def task_score(response: str, answer: Any, prompt: Prompt) -> float:
    """The task's own score, mostly 0 to 1 and partly graded, of the text in the last <answer>...</answer>.

    Without such tags: of the last number if the answer is one, else of the last line. The data source puts the task's metadata into
    prompt.meta; raises ValueError when it is missing.
    """
    metadata = prompt.meta.get("metadata") or {}
    if "source_dataset" not in metadata:
        raise ValueError(f"prompt {prompt.id} lacks reasoning-gym's metadata: use reasoning-gym:<task>, or keep the column `metadata`")
    entry = {"question": prompt.text, "answer": answer, "metadata": metadata}
    return float(scorer(metadata["source_dataset"])(answer=find_answer(response, answer), entry=entry))


task_score.find_answer = lambda response, answer, prompt: find_answer(response, answer).strip() or None


def find_answer(response: str, answer: Any) -> str:
    """The part of the response that answers."""
    tagged = extract_answer(response)
    if tagged is not None:
        return tagged
    number = find_last(response) if read_whole(str(answer)) is not None else None
    if number is not None:
        return str(number.numerator) if number.denominator == 1 else str(float(number))
    lines = response.strip().splitlines()
    return lines[-1].strip() if lines else ""
