"""Policy losses, one number per response token. Masks, weights and sums are not here: see aggregation.py.

A loss is `fn(logp, inputs, cfg) -> (per_token, stats)`; every tensor is [R], the response tokens of all sequences of a pack in a row.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from megaflow.algo import LOSSES
from megaflow.algo.kl import kl_estimate
from megaflow.config.schema import AlgoConfig

LOG_RATIO_LIMIT = 20.0  # e^20: only keeps exp() finite; one step apart, policies never come near it


@dataclass(frozen=True)
class LossInputs:
    """What is known of a pack's response tokens beside their log-probabilities under the policy being trained. No gradients."""

    old_logp: Tensor  # [R] the trainer's own, before the update
    advantage: Tensor  # [R]
    rollout_logp: Tensor  # [R] as the engine sampled them
    seq_index: Tensor  # [R] int64, which sequence of the pack a token belongs to
    num_seqs: int  # sequences in the pack
    ref_logp: Tensor | None = None  # [R] the reference model's; needed when cfg.kl.where is "loss"


Loss = Callable[[Tensor, LossInputs, AlgoConfig], tuple[Tensor, dict[str, Tensor]]]


def ppo_clip(logp: Tensor, inputs: LossInputs, cfg: AlgoConfig) -> tuple[Tensor, dict[str, Tensor]]:
    """The clipped surrogate: -min(ratio * A, clip(ratio, 1 - low, 1 + high) * A), ratio = exp(logp - old_logp).

    PPO (arXiv:1707.06347) equation 7; bounds that differ: DAPO's clip-higher (arXiv:2503.14476) equation 10.
    Stats, all [R]:
      ratio      the ratio
      clip_frac  1 where the clip has taken the gradient away: A > 0 and ratio > 1 + high, or A < 0 and ratio < 1 - low; else 0.
                 (A ratio out of bounds on the *other* side keeps its gradient, and is not counted.)
      kl         k3 estimate of KL(old || new), how far this update has gone: ratio - 1 - log ratio
    """
    log_ratio = (logp - inputs.old_logp).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    ratio = log_ratio.exp()
    low, high = 1.0 - cfg.clip.low, 1.0 + cfg.clip.high
    advantage = inputs.advantage
    per_token = -torch.minimum(ratio * advantage, ratio.clamp(low, high) * advantage)
    with torch.no_grad():
        clipped = ((advantage > 0) & (ratio > high)) | ((advantage < 0) & (ratio < low))
        kl = torch.expm1(log_ratio) - log_ratio
    return per_token, {"ratio": ratio.detach(), "clip_frac": clipped.to(logp.dtype), "kl": kl}


def objective(logp: Tensor, entropy: Tensor | None, inputs: LossInputs, cfg: AlgoConfig) -> tuple[Tensor, dict[str, Tensor]]:
    """What is minimised for each token: the loss named by cfg.loss, plus kl.coef * KL to the reference, minus the entropy bonus.

    logp [R] with gradient; entropy [R] of the policy at each token, with gradient if cfg.entropy > 0 (None: not measured).
    Returns (per_token [R], stats of [R] without gradients); `ref_kl` and `entropy` are among the stats when they are known.
    """
    per_token, stats = LOSSES.get(cfg.loss)(logp, inputs, cfg)
    if inputs.ref_logp is not None:
        ref_kl = kl_estimate(logp, inputs.ref_logp, cfg.kl.estimator)
        stats["ref_kl"] = ref_kl.detach()
        if cfg.kl.where == "loss":
            per_token = per_token + cfg.kl.coef * ref_kl
    assert inputs.ref_logp is not None or cfg.kl.where != "loss", "algo.kl.where=loss needs LossInputs.ref_logp"
    if entropy is not None:
        stats["entropy"] = entropy.detach()
        if cfg.entropy:
            per_token = per_token - cfg.entropy * entropy
    assert entropy is not None or not cfg.entropy, "algo.entropy > 0 needs the entropy of each token"
    return per_token, stats
