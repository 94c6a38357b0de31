"""Which samples carry a signal."""

from __future__ import annotations

import torch
from torch import Tensor


def uniform_groups(rewards: Tensor, groups: Tensor) -> Tensor:
    """True for each sample whose whole group got the same reward, so that its advantage is 0 (a group of one always is).

    rewards [N] float, groups [N] int64 (any labels, any order) -> [N] bool. DAPO (arXiv:2503.14476) section 3.2 leaves these out.
    """
    assert rewards.dim() == 1 and rewards.shape == groups.shape, (rewards.shape, groups.shape)
    labels, index = torch.unique(groups, return_inverse=True)
    lowest = rewards.new_empty(len(labels)).scatter_reduce_(0, index, rewards, "amin", include_self=False)  # [G]
    highest = rewards.new_empty(len(labels)).scatter_reduce_(0, index, rewards, "amax", include_self=False)  # [G]
    return (lowest == highest)[index]
