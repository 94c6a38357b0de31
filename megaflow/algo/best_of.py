"""What several answers to one question are worth together: the best of k, and the vote of all."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from math import comb


def pass_probability(n: int, c: int, k: int) -> float:
    """Probability that k of n answers, c of them right, have a right one among them: 1 - C(n-c, k) / C(n, k).

    The unbiased estimate of pass@k from n >= k samples: Chen et al. 2021, "Evaluating Large Language Models Trained on Code"
    (arXiv:2107.03374) equation 1.
    """
    assert 0 <= c <= n and 1 <= k <= n, (n, c, k)
    return 1.0 - comb(n - c, k) / comb(n, k)


def majority_solved(answers: Sequence[str | None], solved: Sequence[bool]) -> float:
    """Whether the answer given most often is right: 1 or 0, and their mean when several answers have as many votes.

    answers: what each response answers, None for one that answers nothing and has no vote; solved: whether it is right. When equal
    answers were judged differently, their mean counts. No vote at all: 0. Self-consistency: Wang et al. (arXiv:2203.11171).
    """
    votes: dict[str, list[bool]] = defaultdict(list)
    for answer, is_right in zip(answers, solved, strict=True):
        if answer is not None:
            votes[answer].append(is_right)
    most = max(map(len, votes.values()), default=0)
    winners = [sum(v) / len(v) for v in votes.values() if len(v) == most]
    return sum(winners) / len(winners) if winners else 0.0
