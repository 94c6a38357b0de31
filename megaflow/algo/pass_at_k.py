"""Advantages for a policy that is judged by the best of k tries."""

from __future__ import annotations

from math import comb, sqrt

import torch
from torch import Tensor

from megaflow.algo.advantages import STD_EPS
from megaflow.config.schema import AlgoConfig
from megaflow.types import ConfigError


def pass_at_k(rewards: Tensor, groups: Tensor, cfg: AlgoConfig) -> Tensor:
    """What a sample adds to the best of k = cfg.pass_k samples of its group, over the std of that best.

    All subsets of k samples are tried, each scored by its largest reward. With m and s the mean and standard deviation of the score
    over all subsets, and m_i its mean over those with sample i in them: A_i = (m_i - m) / (s + 1e-6), or m_i - m when cfg.norm_std is
    False. In closed form, nothing is enumerated. For rewards of 0 and 1, c of n right, this is

        m = 1 - C(n-c, k) / C(n, k),   s = sqrt(m (1 - m)),   m_i = 1 if i is right, else 1 - C(n-c-1, k-1) / C(n-1, k-1)

    the analytical advantage of "Pass@k Training" (arXiv:2508.10751). rewards [N], groups [N] int64 -> [N] of the rewards' dtype.
    Raises ConfigError if a group has fewer than k samples.
    """
    assert rewards.dim() == 1 and rewards.shape == groups.shape, (rewards.shape, groups.shape)
    out = torch.zeros(len(rewards), dtype=torch.float64)
    for label in groups.unique().tolist():
        members = (groups == label).nonzero()[:, 0].cpu()
        if len(members) < cfg.pass_k:
            text = f"algo.pass_k={cfg.pass_k} samples cannot be drawn from a group of {len(members)}"
            raise ConfigError(f"{text}; set algo.pass_k below rollout.samples_per_prompt")
        ordered, order = rewards[members].double().sort()
        out[members[order]] = torch.tensor(_of_sorted(ordered.tolist(), cfg.pass_k, cfg.norm_std), dtype=torch.float64)
    return out.to(rewards)


def _of_sorted(rewards: list[float], k: int, norm_std: bool) -> list[float]:
    """The advantages of one group; rewards in ascending order, number j has j others at most as large."""
    n = len(rewards)
    values = [r - rewards[0] for r in rewards]  # equal rewards then give exactly 0
    share = [comb(j, k - 1) / comb(n, k) for j in range(n)]  # of the subsets, those whose largest is number j
    mean = sum(p * v for p, v in zip(share, values, strict=True))
    std = sqrt(sum(p * (v - mean) ** 2 for p, v in zip(share, values, strict=True)))
    out, larger = [0.0] * n, 0.0  # larger: what subsets add whose largest is above number i
    for i in reversed(range(n)):
        within = larger + comb(i, k - 1) / comb(n - 1, k - 1) * values[i]
        out[i] = (within - mean) / (std + STD_EPS) if norm_std else within - mean
        if k > 1 and i > 0:  # the largest, one below it, and k - 2 of the i - 1 that remain
            larger += comb(i - 1, k - 2) / comb(n - 1, k - 1) * values[i]
    return out


pass_at_k.needs_tokens = False
