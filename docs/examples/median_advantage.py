"""An advantage and a loss of one's own: the group's median as the baseline, and a surrogate that is flattened instead of clipped.

    python docs/examples/median_advantage.py

docs/adding-an-algorithm.md explains it.
"""

from __future__ import annotations

import torch
from torch import Tensor


def median(rewards: Tensor, groups: Tensor, cfg) -> Tensor:
    """Reward minus the median reward of its group: one lucky sample does not make all the others look bad.

    rewards [N], groups [N] int64 -> [N]. Of an even number the median is the mean of the two in the middle.
    """
    advantages = torch.zeros_like(rewards)
    for group in groups.unique():
        mine = groups == group
        advantages[mine] = rewards[mine] - rewards[mine].quantile(0.5)
    return advantages


median.needs_tokens = False  # it reads one number a sequence, so no token travels to rank 0 for it


def flattened(logp: Tensor, inputs, cfg) -> tuple[Tensor, dict[str, Tensor]]:
    """-A * high * tanh((ratio - 1) / high): the gradient is A's own at ratio 1 and fades on both sides, where ppo_clip cuts it off.

    logp [R], the response tokens' log-probabilities under the policy that is trained -> (loss of each token [R], figures of each token).
    """
    log_ratio = logp - inputs.old_logp
    ratio = log_ratio.exp()
    per_token = -inputs.advantage * cfg.clip.high * torch.tanh((ratio - 1) / cfg.clip.high)
    figures = {"ratio": ratio, "kl": ratio - 1 - log_ratio, "flat": ((ratio - 1).abs() > cfg.clip.high).float()}
    return per_token, {name: figure.detach() for name, figure in figures.items()}


if __name__ == "__main__":
    print(median(torch.tensor([0.0, 0.0, 1.0, 1.0, 1.0, 0.5]), torch.tensor([0, 0, 0, 1, 1, 1]), None).tolist())
