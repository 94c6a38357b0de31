"""Which sequence goes where: balanced over ranks, and packed into micro-batches.

Pure functions of lengths, so all ranks get the same answer without asking each other.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable


def split_balanced(costs: list[int], bins: int) -> list[list[int]]:
    """Indices of `costs` in `bins` lists whose total costs are near each other; no list is empty while there are enough items.

    Longest processing time first (Graham 1969): the costliest item left goes to the bin with the least so far; the largest total is at most
    4/3 - 1/(3 bins) of the best possible. Ties go to the bin with fewer items, then the lower number, so the answer is deterministic.
    """
    assert bins >= 1, bins
    parts: list[list[int]] = [[] for _ in range(bins)]
    heap = [(0, 0, number) for number in range(bins)]  # (total cost, items, bin); sorted already, hence a heap
    for index in sorted(range(len(costs)), key=lambda i: (-costs[i], i)):
        total, items, number = heap[0]
        parts[number].append(index)
        heapq.heapreplace(heap, (total + costs[index], items + 1, number))
    return [sorted(part) for part in parts]


def pack_micro_batches(lengths: list[int], max_tokens: int, min_bins: int = 1, cost: Callable[[int], int] | None = None) -> list[list[int]]:
    """Indices of `lengths` in packs of at most `max_tokens`; a longer single sequence goes alone.

    At least `min_bins` packs: data-parallel ranks must run the same number of forwards, so each passes the largest count among them. When
    there are fewer sequences than that, some packs are empty. The count is first-fit-decreasing's, and the packs are evened out where that
    keeps the limit, for a pipeline waits on its longest micro-batch: by `cost` of a length where it is given, else by tokens.
    """
    assert max_tokens >= 1 and min_bins >= 1, (max_tokens, min_bins)
    packs = _first_fit_decreasing(lengths, max_tokens)
    while len(packs) < min_bins:
        packs += _halve_fullest(packs, lengths)
    costs = lengths if cost is None else [cost(n) for n in lengths]
    even = _even_within(lengths, costs, len(packs), max_tokens) or _even_within(lengths, lengths, len(packs), max_tokens)
    return even or [sorted(pack) for pack in packs]


def _first_fit_decreasing(lengths: list[int], max_tokens: int) -> list[list[int]]:
    packs: list[list[int]] = []
    room: list[int] = []
    for index in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        fitting = next((number for number, left in enumerate(room) if lengths[index] <= left), None)
        if fitting is None:
            packs.append([])
            room.append(max_tokens)
            fitting = len(packs) - 1
        packs[fitting].append(index)
        room[fitting] -= lengths[index]  # negative for a sequence longer than the limit: nothing joins it
    return packs


def _halve_fullest(packs: list[list[int]], lengths: list[int]) -> list[list[int]]:
    """Takes one of several sequences' packs apart in place and returns the new pack: an empty one when every pack is a single sequence."""
    divisible = [number for number, pack in enumerate(packs) if len(pack) > 1]
    if not divisible:
        return [[]]
    fullest = max(divisible, key=lambda number: (sum(lengths[i] for i in packs[number]), -number))
    pack = packs[fullest]
    first, second = split_balanced([lengths[i] for i in pack], 2)
    packs[fullest] = [pack[i] for i in first]
    return [[pack[i] for i in second]]


def _even_within(lengths: list[int], costs: list[int], bins: int, max_tokens: int) -> list[list[int]] | None:
    """As split_balanced, but an item passes over bins whose tokens it would bring above the limit; None when it then finds no bin."""
    parts: list[list[int]] = [[] for _ in range(bins)]
    tokens, totals = [0] * bins, [0] * bins
    for index in sorted(range(len(costs)), key=lambda i: (-costs[i], i)):
        fitting = [b for b in range(bins) if not parts[b] or tokens[b] + lengths[index] <= max_tokens]
        if not fitting:
            return None
        chosen = min(fitting, key=lambda b: (totals[b], len(parts[b]), b))
        parts[chosen].append(index)
        tokens[chosen] += lengths[index]
        totals[chosen] += costs[index]
    return [sorted(part) for part in parts]
