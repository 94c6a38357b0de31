"""What an estimator with `needs_tokens = True` is given and gives back. N samples with R_i response tokens each; ragged, never padded."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class TokenInputs:
    """Token-level columns of a step's samples, each a list of N tensors [R_i] of floats.

    logp        the policy's log-probabilities before the update
    penalty     what the distance to the reference takes off the reward of each token, coefficient included (algo.kl.where=reward)
    values      the critic's expectation before each token; None without a critic
    last_value  [N] its expectation after the last token; None without a critic
    truncated   [N] bool, the response reached its length limit and would have gone on
    """

    logp: list[Tensor]
    penalty: list[Tensor] | None
    values: list[Tensor] | None
    last_value: Tensor | None
    truncated: Tensor


@dataclass(frozen=True)
class TokenAdvantages:
    """advantages, returns: lists of N tensors [R_i] fp32; returns are the critic's targets, None without one."""

    advantages: list[Tensor]
    returns: list[Tensor] | None = None
