"""In which order prompts are handed out: epoch by epoch, or drawn by what they are worth. Positions are saved and taken up again.

An order deals in indices of prompts, its `members`. `skip` holds those to leave out; it is ignored when too few others are there.
"""

from __future__ import annotations

import heapq
import math
import random
from collections.abc import Callable
from typing import Any

Worth = Callable[[int], float]  # index of a prompt -> a number


class Passes:
    """Epoch after epoch, each in a new order made from `seed`; with `worth`, from the highest worth to the lowest at the epoch's begin."""

    def __init__(self, members: list[int], seed: str, shuffle: bool, worth: Worth | None = None):
        self.members, self.seed, self.shuffle, self.worth = members, seed, shuffle, worth
        self._begin(0, avoid=[], ahead=0)

    def take(self, count: int, skip: set[int]) -> list[int]:
        """The next `count`; none twice, as long as there are enough members."""
        skip = self._usable(skip, count)
        taken: list[int] = []
        while len(taken) < count:
            if self.position == len(self.order):
                self._begin(self.epoch + 1, avoid=list(taken), ahead=count - len(taken))
            index = self.order[self.position]
            self.position += 1
            if index not in skip:
                taken.append(index)
        return taken

    def left(self, epochs: int, skip: set[int], count: int) -> int:
        """How many `take` can give before the end of `epochs` epochs, `count` at a time."""
        skip = self._usable(skip, count)
        rest = sum(index not in skip for index in self.order[self.position :])
        return rest + (epochs - self.epoch - 1) * sum(index not in skip for index in self.members)

    def _usable(self, skip: set[int], count: int) -> set[int]:
        return skip if skip and sum(index not in skip for index in self.members) >= count else set()

    def _begin(self, epoch: int, avoid: list[int], ahead: int, order: list[int] | None = None) -> None:
        self.epoch, self.position, self.avoid, self.ahead = epoch, 0, avoid, ahead
        self.order = self._make_order() if order is None else order

    def _make_order(self) -> list[int]:
        order = list(self.members)
        if self.shuffle:
            random.Random(f"{self.seed}/{self.epoch}").shuffle(order)  # the standard library keeps this sequence from version to version
        if self.worth is not None:
            order.sort(key=self.worth, reverse=True)  # stable: equals stay shuffled
        return _without_repeats(order, set(self.avoid), self.ahead)

    def state_dict(self) -> dict[str, Any]:
        """JSON will hold it. The order itself is there when it depends on what is not."""
        state = {"epoch": self.epoch, "position": self.position, "avoid": self.avoid, "ahead": self.ahead}
        return state | ({"order": self.order} if self.worth is not None else {})

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._begin(state["epoch"], list(state["avoid"]), state["ahead"], state.get("order"))
        self.position = state["position"]


class Draws:
    """Each batch is drawn anew, without repeats, a prompt's chance growing with its worth; an epoch is as many prompts as members."""

    def __init__(self, members: list[int], seed: str, worth: Worth):
        self.members, self.seed, self.worth = members, seed, worth
        self.draws = self.handed = 0

    @property
    def epoch(self) -> int:
        return self.handed // len(self.members)

    def take(self, count: int, skip: set[int]) -> list[int]:
        """`count` prompts by their present worth: Efraimidis and Spirakis 2006, the largest u^(1/worth)."""
        open_to = [index for index in self.members if index not in skip] if skip else self.members
        candidates = open_to if len(open_to) >= count else self.members
        taken: list[int] = []
        while len(taken) < count:  # more than once only if there are fewer prompts than are asked for
            rng = random.Random(f"{self.seed}/draw/{self.draws}")
            self.draws += 1
            keyed = [(math.log(1.0 - rng.random()) / self.worth(index), -place) for place, index in enumerate(candidates)]
            taken += [candidates[-place] for _, place in heapq.nlargest(count - len(taken), keyed)]
        self.handed += count
        return taken

    def state_dict(self) -> dict[str, Any]:
        """JSON will hold it."""
        return {"draws": self.draws, "handed": self.handed}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.draws, self.handed = state["draws"], state["handed"]


def shares(weights: list[float], handed: list[int], count: int) -> list[int]:
    """Which source each of the next `count` prompts comes from: always the one that is farthest behind its weight.

    handed: what each has given so far.
    """
    handed, total = list(handed), sum(weights)
    chosen = []
    for _ in range(count):
        due = sum(handed) + 1
        number = max(range(len(weights)), key=lambda i: (weights[i] / total * due - handed[i], -i))
        handed[number] += 1
        chosen.append(number)
    return chosen


def _without_repeats(order: list[int], avoid: set[int], ahead: int) -> list[int]:
    """`order` with its first `ahead` places free of `avoid`, as far as there are enough others.

    `avoid` is what the batch that crosses the border of two epochs already holds, `ahead` what it still needs.
    """
    others = [index for index in order if index not in avoid] if avoid else order
    if len(others) < ahead or not avoid:
        return order
    first = set(others[:ahead])
    return others[:ahead] + [index for index in order if index not in first]
