"""Imitation and preferences: what is minimised over stored responses. Pure functions; logp [R] as in losses.py, pairs [P].

DPO and IPO depend on a sequence's log-probability only through its sum S, so their gradient is that of a weighted policy gradient:

    d loss / d theta = (d loss / d margin) * (d S_chosen / d theta - d S_rejected / d theta)

with one number per pair, known after a forward pass without gradients. So a pair's two sequences may lie in different packs, on
different ranks, and need no second model in memory.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from megaflow.algo.losses import LossInputs
from megaflow.config.schema import AlgoConfig, OfflineConfig


def sft(logp: Tensor, entropy: Tensor | None, inputs: LossInputs, cfg: AlgoConfig) -> tuple[Tensor, dict[str, Tensor]]:
    """-logp of each response token; the mean is algo.aggregation's."""
    per_token = -logp
    if cfg.aggregation == "sequence_sum":
        per_token = per_token / cfg.length_constant
    return per_token, {"nll": -logp.detach()} | ({} if entropy is None else {"entropy": entropy.detach()})


def preference_loss(margin: Tensor, cfg: OfflineConfig) -> tuple[Tensor, Tensor]:
    """(loss of each pair, its derivative by the margin), float64 [P].

    margin [P] = (S - S_ref) of chosen - (S - S_ref) of rejected, S the sum of a response's log-probabilities. With h = beta * margin:
      sigmoid  -(1 - e) log sigmoid(h) - e log sigmoid(-h)   DPO (arXiv:2305.18290) equation 7; e = label_smoothing > 0: conservative DPO
      ipo      (margin - 1 / (2 beta))^2                      IPO (arXiv:2310.12036) equation 17
    """
    margin = margin.double()
    if cfg.dpo_loss == "ipo":
        distance = margin - 1 / (2 * cfg.beta)
        return distance.square(), 2 * distance
    h, e = cfg.beta * margin, cfg.label_smoothing
    loss = -(1 - e) * logsigmoid(h) - e * logsigmoid(-h)
    return loss, cfg.beta * (torch.sigmoid(h) - (1 - e))


def weighted_logp(logp: Tensor, entropy: Tensor | None, inputs: LossInputs, cfg: AlgoConfig) -> tuple[Tensor, dict[str, Tensor]]:
    """-2 * advantage * logp, to be summed by aggregation=sequence_sum: its mean over sequences is then the mean over pairs of two.

    Its gradient is that of preference_loss when a chosen sequence's advantage is -derivative and a rejected one's is +derivative.
    """
    return -2.0 * inputs.advantage * logp, {} if entropy is None else {"entropy": entropy.detach()}
