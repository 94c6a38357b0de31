"""How often each prompt is solved: a running figure, kept with the data's position."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from megaflow.types import PreflightError, Prompt

UNKNOWN = 0.5  # where a prompt that nobody has tried yet is placed among the others
LEAST_WORTH = 0.05  # a prompt far from the target is still drawn now and then, or nobody would see it change


@dataclass
class Record:
    rate: float  # running pass rate
    times: int = 0  # how often the prompt was tried
    in_row: int = 0  # how often in a row all its samples were solved


class PassRates:
    """Index of a prompt -> Record. `memory` is the weight of the earlier figure when a new one comes in."""

    def __init__(self, memory: float, known: dict[int, float]):
        self.memory = memory
        self.records = {index: Record(rate) for index, rate in known.items()}

    def record(self, index: int, rate: float) -> None:
        """A prompt was tried, and this part of its samples was solved."""
        old = self.records.get(index)
        new = rate if old is None else self.memory * old.rate + (1.0 - self.memory) * rate
        times, in_row = (old.times, old.in_row) if old else (0, 0)
        self.records[index] = Record(new, times + 1, in_row + 1 if rate >= 1.0 else 0)

    def rate(self, index: int) -> float:
        """UNKNOWN for one that was never tried."""
        return self.records[index].rate if index in self.records else UNKNOWN

    def worth(self, index: int, target: float) -> float:
        """1 at the target and for a prompt never tried, falling linearly to LEAST_WORTH where the pass rate is farthest from it."""
        if index not in self.records:
            return 1.0
        distance = abs(self.records[index].rate - target) / max(target, 1.0 - target)
        return max(LEAST_WORTH, 1.0 - distance)

    def solved(self, times: int) -> set[int]:
        """Prompts all of whose samples were solved the last `times` times; none for 0."""
        return {index for index, record in self.records.items() if record.in_row >= times} if times else set()

    def mean(self) -> float | None:
        """Over the prompts with a figure."""
        return sum(r.rate for r in self.records.values()) / len(self.records) if self.records else None

    def state_dict(self) -> dict[str, Any]:
        """JSON will hold it."""
        return {str(index): list(vars(record).values()) for index, record in self.records.items()}

    def copy(self) -> PassRates:
        """As they are now: a record is replaced and never changed."""
        found = PassRates(self.memory, {})
        found.records = dict(self.records)
        return found

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.records = {int(index): Record(*values) for index, values in state.items()}


def known_rates(prompts: list[Prompt], key: str) -> dict[int, float]:
    """Pass rates that the data brings along in column `key`, where a line has it. PreflightError for one that is none."""
    known: dict[int, float] = {}
    for index, prompt in enumerate(prompts):
        value = prompt.meta.get(key) if key else None
        if value is None:
            continue
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= 1:
            raise PreflightError(f"prompt {prompt.id}: its pass rate (data.pass_rate_key={key}) is {value!r}, not a number of [0, 1]")
        known[index] = float(value)
    if key and prompts and not known:
        raise PreflightError(f"data.pass_rate_key={key}: no training prompt has this column")
    return known
