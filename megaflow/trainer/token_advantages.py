"""The logic block for estimators that read tokens (GAE): their columns gathered from the samples, one advantage a token back. Rank 0."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from megaflow.algo.kl import kl_estimate
from megaflow.algo.tokens import TokenAdvantages, TokenInputs
from megaflow.config.schema import Config
from megaflow.types import Sample, Stats


def token_advantages(
    estimator: Callable[..., TokenAdvantages], samples: list[Sample], rewards: Tensor, groups: Tensor, cfg: Config, kl_coef: float
) -> tuple[TokenAdvantages, Stats]:
    """Advantages of every response token, and what the critic's values were worth.

    rewards [N]: without the distance to the reference, which is taken off token by token. Samples carry their token tensors.
    """
    tokens = token_inputs(samples, cfg, kl_coef)
    found = estimator(rewards, groups, cfg.algo, tokens)
    for sample, advantage in zip(samples, found.advantages, strict=True):
        assert advantage.shape == (sample.num_response,), f"{tuple(advantage.shape)} advantages for {sample.num_response} tokens"
    return found, value_stats(tokens.values, found.returns)


def token_inputs(samples: list[Sample], cfg: Config, kl_coef: float) -> TokenInputs:
    penalty = values = last = None
    if cfg.algo.kl.where == "reward":
        penalty = [kl_coef * kl_estimate(s.old_logp, s.ref_logp, cfg.algo.kl.estimator).double() for s in samples]
    if all(s.values is not None for s in samples):
        values, last = [s.values for s in samples], torch.tensor([s.sums["last_value"] for s in samples])
    return TokenInputs([s.old_logp for s in samples], penalty, values, last, torch.tensor([s.finish == "length" for s in samples]))


def value_stats(values: list[Tensor] | None, returns: list[Tensor] | None) -> Stats:
    """Over all response tokens. explained_variance is 1 - Var(return - value) / Var(return): 1 a perfect critic, 0 one that knows no
    more than the mean, below 0 a harmful one; 0 also where all returns are equal."""
    if values is None or returns is None:
        return {}
    v, r = torch.cat(values).double(), torch.cat(returns).double()
    if not len(r):
        return {}
    variance = float(r.var(correction=0))
    explained = 1 - float((r - v).var(correction=0)) / variance if variance > 0 else 0.0
    return {"critic/value_mean": float(v.mean()), "critic/return_mean": float(r.mean()), "critic/explained_variance": explained}
