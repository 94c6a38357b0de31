"""How much better a sample was than its group. N samples, G groups.

An advantage function carries the attribute `needs_tokens`: False means that it reads one number per sequence and returns one, so
token-level tensors need not travel to the rank that computes it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megaflow.config.schema import AlgoConfig

STD_EPS = 1e-6  # verl's and TRL's order of magnitude: keeps a nearly uniform group finite, changes others by less than 1e-5


def grpo(rewards: Tensor, groups: Tensor, cfg: AlgoConfig) -> Tensor:
    """Group-relative advantages: (r - mean) / (std + 1e-6), or r - mean when cfg.norm_std is False.

    rewards [N] float, groups [N] int64 (any labels, any order, any sizes) -> [N] of the rewards' dtype. std is the unbiased one
    (divides by n - 1), as in verl. A group of one sample, or of equal rewards, gets exactly 0: it says nothing about better or worse.

    DeepSeekMath (arXiv:2402.03300) section 4.1.2; without std: "Dr. GRPO" (arXiv:2503.20783) section 3.2.
    """
    assert rewards.dim() == 1 and rewards.shape == groups.shape, (rewards.shape, groups.shape)
    _, index, size = torch.unique(groups, return_inverse=True, return_counts=True)  # [N], [G]
    # float64: the mean of n equal fp32 rewards is then exactly that reward. In fp32 the rounding error of the mean, divided by
    # a std of nearly 0, would make advantages of about 1e-2 out of nothing.
    values = rewards.double()
    centred = values - (_group_sum(values, index, len(size)) / size)[index]
    if not cfg.norm_std:
        return centred.to(rewards.dtype)
    variance = _group_sum(centred.square(), index, len(size)) / (size - 1).clamp(min=1)
    return (centred / (variance.sqrt() + STD_EPS)[index]).to(rewards.dtype)


grpo.needs_tokens = False


def _group_sum(values: Tensor, index: Tensor, num_groups: int) -> Tensor:
    """Sum of values [N] over each group -> [G]."""
    return values.new_zeros(num_groups).index_add_(0, index, values)
