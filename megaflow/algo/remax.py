"""ReMax: the reward of the greedy response is the baseline."""

from __future__ import annotations

from torch import Tensor

from megaflow.config.schema import AlgoConfig


def remax(rewards: Tensor, groups: Tensor, cfg: AlgoConfig, baseline: Tensor | None = None) -> Tensor:
    """r minus the reward of the same prompt's greedy response. One sample per prompt is enough; groups do not matter.

    rewards [N] float, baseline [N] float: that greedy reward, for each sample -> [N] of the rewards' dtype.

    ReMax (arXiv:2310.10505) equation 4, algorithm 1.
    """
    assert baseline is not None and baseline.shape == rewards.shape, "remax needs the greedy response's reward of each sample's prompt"
    return (rewards.double() - baseline.double()).to(rewards.dtype)


remax.needs_tokens = False
remax.needs_lengths = False
remax.needs_greedy = True
