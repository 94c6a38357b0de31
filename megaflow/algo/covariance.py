"""Which tokens drive the policy's entropy down: those whose log-probability and advantage are both large, or both small.

"The Entropy Mechanism of Reinforcement Learning for Reasoning Language Models" (arXiv:2505.22617) section 4: the entropy falls with
the covariance of log-probability and advantage, and a few tokens make most of it. Clip-Cov takes the gradient of some of them away,
KL-Cov holds the largest back. Both choose among all tokens of a mini batch, over all ranks, so the choice is made before the loss:

    cov_t = (logp_t - mean logp) * (A_t - mean A)         means over the tokens of the mini batch

A loss that needs a choice carries it as the attribute `choice`; the tokens of largest score are marked (LossInputs.marked).
The log-probabilities are those before the update, so the marks of a mini batch do not depend on the optimizer steps before it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from megaflow.config.schema import AlgoConfig

NEVER = -torch.inf  # the score of a token that must not be marked


@dataclass(frozen=True)
class Choice:
    """score(cov [R], draw [R] uniform of [0, 1), cfg) -> [R], larger goes first; part(cfg): of the tokens of a mini batch are marked."""

    score: Callable[[Tensor, Tensor, AlgoConfig], Tensor]
    part: Callable[[AlgoConfig], float]

    def count(self, total_tokens: int, cfg: AlgoConfig) -> int:
        """At least one, as in the authors' code: the floor of the paper marks nothing in a small batch."""
        return max(1, int(self.part(cfg) * total_tokens))


def within_bounds_at_random(cov: Tensor, draw: Tensor, cfg: AlgoConfig) -> Tensor:
    """Clip-Cov, equation 11: uniformly among the tokens with low <= cov <= high."""
    return torch.where((cov >= cfg.cov.low) & (cov <= cfg.cov.high), draw, NEVER)


def largest(cov: Tensor, draw: Tensor, cfg: AlgoConfig) -> Tensor:
    """KL-Cov, equation 13: by rank."""
    return cov


def covariance(logp: Tensor, advantage: Tensor, mean_logp: float, mean_advantage: float) -> Tensor:
    """Equation 10, for each token [R]; float64."""
    return (logp.double() - mean_logp) * (advantage.double() - mean_advantage)


def draws(length: int, *names: int) -> Tensor:
    """`length` numbers of [0, 1) that depend on nothing but `names`: the run's seed, step, group, index. [length] float64."""
    seed = int.from_bytes(hashlib.sha256(repr(names).encode()).digest()[:8], "little", signed=True)
    return torch.rand(length, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def best(rows: Tensor, count: int) -> Tensor:
    """The `count` rows of largest score; rows [M, 4] float64 are score, group, index, position. Ties go to the lowest place."""
    rows = rows[rows[:, 0] > NEVER]
    if len(rows) > count:  # a rank may have millions of tokens, and few are wanted
        rows = rows[rows[:, 0] >= rows[:, 0].topk(count).values[-1]]
    for column in (3, 2, 1):
        rows = rows[rows[:, column].argsort(stable=True)]
    return rows[rows[:, 0].argsort(descending=True, stable=True)][:count]
