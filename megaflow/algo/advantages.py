"""How much better a sample was than its group, or than the batch. N samples, G groups.

An advantage function carries the attribute `needs_tokens`: False means that it reads one number per sequence and returns one, so
token-level tensors need not travel to the rank that computes it. With `needs_lengths = True` it is given `lengths`, the response
tokens of each sample, [N] int64.

Sums are made in float64: the mean of n equal fp32 rewards is then exactly that reward. In fp32 the rounding error of the mean, divided
by a std of nearly 0, would make advantages of about 1e-2 out of nothing.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megaflow.algo.filters import uniform_groups
from megaflow.config.schema import AlgoConfig

STD_EPS = 1e-6  # verl's (TRL has 1e-4; the papers give none): keeps a nearly uniform group finite, changes others by less than 1e-5


def grpo(rewards: Tensor, groups: Tensor, cfg: AlgoConfig) -> Tensor:
    """Group-relative advantages: (r - mean) / (std + 1e-6), or r - mean when cfg.norm_std is False.

    rewards [N] float, groups [N] int64 (any labels, any order, any sizes) -> [N] of the rewards' dtype. std is the unbiased one
    (divides by n - 1), as in verl. A group of one sample, or of equal rewards, gets exactly 0: it says nothing about better or worse.

    DeepSeekMath (arXiv:2402.03300) section 4.1.2; without std: "Dr. GRPO" (arXiv:2503.20783) section 3.2.
    """
    centred, index, size = _centred(rewards, groups)
    if not cfg.norm_std:
        return centred.to(rewards.dtype)
    variance = _group_sum(centred.square(), index, len(size)) / (size - 1).clamp(min=1)
    return (centred / (variance.sqrt() + STD_EPS)[index]).to(rewards.dtype)


def rloo(rewards: Tensor, groups: Tensor, cfg: AlgoConfig) -> Tensor:
    """Leave one out: r minus the mean reward of the *other* samples of its group, which is n / (n - 1) * (r - mean).

    Shapes as for grpo. A sample that is alone in its group has no baseline and gets 0.

    "Back to Basics" (arXiv:2402.14740) section 2.3, after Kool et al. 2019.
    """
    centred, index, size = _centred(rewards, groups)
    return (centred * (size.double() / (size - 1).clamp(min=1))[index]).to(rewards.dtype)


def opo(rewards: Tensor, groups: Tensor, cfg: AlgoConfig, lengths: Tensor | None = None) -> Tensor:
    """r minus the group's length-weighted mean reward, sum(length * r) / sum(length). No std.

    That is the baseline of least variance if the squared gradient of a sequence's log-probability grows as its length does.
    lengths [N] int64, the responses' tokens; else as for grpo. "On-Policy RL with Optimal Reward Baseline" (arXiv:2505.23585).
    """
    assert lengths is not None and lengths.shape == rewards.shape, "opo weighs by the responses' lengths"
    centred, index, size = _centred(rewards, groups)
    weights = lengths.double()
    total = _group_sum(weights, index, len(size)).clamp(min=1)  # a group of empty responses has no token to train on: any number does
    return (centred - (_group_sum(weights * centred, index, len(size)) / total)[index]).to(rewards.dtype)


def gpg(rewards: Tensor, groups: Tensor, cfg: AlgoConfig) -> Tensor:
    """alpha * (r - mean), alpha = N / (samples of groups whose rewards differ).

    The gradient is a mean over all samples, and those of uniform groups add nothing to it: alpha makes it the mean over the others.
    With cfg.drop_uniform they are not part of that mean in the first place, and alpha is 1. Shapes as for grpo.

    GPG (arXiv:2504.02546) equations 6 to 8, with its normaliser F_norm = 1.
    """
    centred, _, _ = _centred(rewards, groups)
    informative = int((~uniform_groups(rewards, groups)).sum())
    alpha = 1.0 if cfg.drop_uniform else len(rewards) / max(informative, 1)
    return (alpha * centred).to(rewards.dtype)


def reinforce_pp(rewards: Tensor, groups: Tensor, cfg: AlgoConfig, lengths: Tensor | None = None) -> Tensor:
    """REINFORCE++: (r - mean) / (std + 1e-6) over the whole batch; groups do not matter, and one sample per prompt is enough.

    Mean and std are over all tokens of the batch, each of which has its sequence's r: a sequence counts `lengths` times (all equally
    when lengths is None), as in the authors' code, OpenRLHF; appendix B.2 of the paper counts samples. std divides by the number of
    tokens. Equal rewards give 0. Shapes as for opo.

    REINFORCE++ (arXiv:2501.03262, version 9) equation 5.
    """
    return _normalised(rewards.double(), lengths).to(rewards.dtype)


def reinforce_pp_baseline(rewards: Tensor, groups: Tensor, cfg: AlgoConfig, lengths: Tensor | None = None) -> Tensor:
    """REINFORCE++-baseline: r minus its group's mean, then normalised over the whole batch as reinforce_pp does.

    Counted by tokens, the mean of r - mean is not exactly 0, so a group of equal rewards gets a small advantage of its own (as in
    verl); cfg.drop_uniform leaves such groups out. A group of one gets what a uniform one gets.

    REINFORCE++ (arXiv:2501.03262, version 9) equations 6 and 7.
    """
    return _normalised(_centred(rewards, groups)[0], lengths).to(rewards.dtype)


for _function in (grpo, rloo, opo, gpg, reinforce_pp, reinforce_pp_baseline):
    _function.needs_tokens = False
    _function.needs_lengths = _function in (opo, reinforce_pp, reinforce_pp_baseline)


def _centred(rewards: Tensor, groups: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(rewards minus their group's mean [N] float64, number of the group [N], size of each group [G])."""
    assert rewards.dim() == 1 and rewards.shape == groups.shape, (rewards.shape, groups.shape)
    _, index, size = torch.unique(groups, return_inverse=True, return_counts=True)
    values = rewards.double()
    return values - (_group_sum(values, index, len(size)) / size)[index], index, size


def _normalised(values: Tensor, lengths: Tensor | None) -> Tensor:
    """(values - mean) / (std + 1e-6) with each value [N] counted `lengths` times."""
    values = values - values[:1]  # equal ones are then exactly 0, whatever the weights' rounding
    weights = torch.ones_like(values) if lengths is None else lengths.double()
    weights = weights / weights.sum().clamp(min=1)
    centred = values - (weights * values).sum()
    return centred / ((weights * centred.square()).sum().sqrt() + STD_EPS)


def _group_sum(values: Tensor, index: Tensor, num_groups: int) -> Tensor:
    """Sum of values [N] over each group -> [G]."""
    return values.new_zeros(num_groups).index_add_(0, index, values)
