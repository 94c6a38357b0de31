"""Balance and packing: properties over many random inputs, and cases worked out by hand."""

from __future__ import annotations

import random

import pytest

from megaflow.data import pack_micro_batches, split_balanced


def draws(number: int = 300):
    rng = random.Random(0)
    for _ in range(number):
        yield [rng.choice([0, 1, 5, rng.randint(1, 400)]) for _ in range(rng.randint(0, 40))], rng.randint(1, 9), rng.randint(50, 500)


def everything_once(parts: list[list[int]], number: int) -> bool:
    return sorted(index for part in parts for index in part) == list(range(number))


def test_split_by_hand():
    # 7 to bin 0, 6 to bin 1, 5 to bin 1 (11), 4 to bin 0 (11), 3 to bin 0 (14; fewer-items tie goes to the lower number)
    assert split_balanced([3, 7, 5, 4, 6], 2) == [[0, 1, 3], [2, 4]]
    assert split_balanced([], 3) == [[], [], []]
    assert split_balanced([9], 2) == [[0], []]


def test_split_is_whole_and_leaves_no_bin_empty():
    for costs, bins, _ in draws():
        parts = split_balanced(costs, bins)
        assert len(parts) == bins and everything_once(parts, len(costs))
        assert len(costs) < bins or all(parts)


def test_split_keeps_grahams_bound():
    """Largest total <= (4/3 - 1/(3m)) optimum; the optimum is found here by trying everything."""
    rng = random.Random(1)
    for _ in range(60):
        costs, bins = [rng.randint(1, 30) for _ in range(rng.randint(1, 7))], rng.randint(1, 3)
        best = min(max(loads) for loads in all_loads(costs, bins))
        largest = max(sum(costs[i] for i in part) for part in split_balanced(costs, bins))
        assert largest <= (4 / 3 - 1 / (3 * bins)) * best + 1e-9


def all_loads(costs: list[int], bins: int):
    for code in range(bins ** len(costs)):
        loads = [0] * bins
        for cost in costs:
            code, number = divmod(code, bins)
            loads[number] += cost
        yield loads


def test_split_of_many_equal_items_is_even():
    assert sorted(len(part) for part in split_balanced([17] * 10, 4)) == [2, 2, 3, 3]


def test_packs_by_hand():
    # first-fit decreasing: [6, 4], [5, 5], two packs and both full
    assert sorted(map(sorted, pack_micro_batches([4, 5, 6, 5], 10))) == [[0, 2], [1, 3]]
    # longest-first into two bins would give 3+2+2=7 > 6, so first-fit's [3, 3] and [2, 2, 2] must stay
    assert sorted(pack_micro_batches([3, 3, 2, 2, 2], 6)) == [[0, 1], [2, 3, 4]]
    assert pack_micro_batches([100, 1], 10) == [[0], [1]]  # too long: alone
    assert pack_micro_batches([], 10, min_bins=2) == [[], []]
    assert sorted(map(len, pack_micro_batches([1], 10, min_bins=3))) == [0, 0, 1]


def test_packs_are_evened_out():
    assert [4 * len(pack) for pack in pack_micro_batches([4, 4, 4, 4, 4, 4], 16)] == [12, 12]  # first fit alone: 16 and 8


@pytest.mark.parametrize("min_bins", [1, 3, 12])
def test_packs_hold_the_limit(min_bins: int):
    for lengths, _, limit in draws():
        packs = pack_micro_batches(lengths, limit, min_bins)
        assert everything_once(packs, len(lengths)) and len(packs) >= min_bins
        assert all(len(pack) == 1 or sum(lengths[i] for i in pack) <= limit for pack in packs if pack)
        assert len(lengths) < min_bins or min_bins == 1 or all(packs)
        assert packs == pack_micro_batches(list(lengths), limit, min_bins)


def test_asking_for_the_largest_count_gives_every_rank_that_count():
    for lengths, _, limit in draws(100):
        own = len(pack_micro_batches(lengths, limit))
        assert len(pack_micro_batches(lengths, limit, min_bins=own + 2)) == own + 2
