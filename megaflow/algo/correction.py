"""Weights that make up for the difference between the distribution that sampled (the engine's) and the trainer's.

Both hold the same weights, yet their kernels, dtypes and batching differ, so tokens are drawn from a slightly other distribution than
the one that is differentiated. With rho = exp(old_logp - rollout_logp) at each token, a correction multiplies the policy loss by

    token_tis       min(rho_t, high)                          truncated importance sampling
    sequence_tis    min(prod of the sequence's rho, high)     the same, for whole sequences
    icepop          rho_t if low <= rho_t <= high, else 0     (arXiv:2510.18855)
    token_mask      1 if low <= rho_t <= high, else 0
    sequence_mask   1 if low <= prod of rho <= high, else 0   the whole sequence is kept or rejected
    geometric_mask  the same by the geometric mean, prod of rho ** (1 / length), which does not drift with length

TIS: F. Yao et al., "Your Efficient RL Framework Secretly Brings You Off-Policy RL Training" (2025); Ionides (2008) for the truncation.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megaflow.algo.per_sequence import means, sums
from megaflow.config.schema import CorrectionConfig

LOG_RATIO_LIMIT = 20.0  # e^20: keeps exp() of a sum over thousands of tokens finite; far beyond any bound that makes sense


@torch.no_grad()
def correction(
    old_logp: Tensor, rollout_logp: Tensor, seq_index: Tensor, num_seqs: int, cfg: CorrectionConfig
) -> tuple[Tensor, dict[str, Tensor]]:
    """(the factor of each token's policy loss [R], stats of [R]); no gradient flows through it.

    old_logp, rollout_logp [R]: of the same tokens, the trainer's before the update and the engine's. cfg.mode is not "none".
    Stats: correction_weight, the factor; correction_cut, 1 where a bound was passed (truncated or masked), else 0.
    """
    log_rho = old_logp - rollout_logp
    if cfg.mode in ("sequence_tis", "sequence_mask"):
        log_rho = sums(log_rho, seq_index, num_seqs)[seq_index].to(old_logp.dtype)
    elif cfg.mode == "geometric_mask":
        log_rho = means(log_rho, seq_index, num_seqs)[seq_index].to(old_logp.dtype)
    rho = log_rho.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp()
    if cfg.mode in ("token_tis", "sequence_tis"):
        cut = rho > cfg.high
        weight = rho.clamp(max=cfg.high)
    else:
        assert cfg.mode in ("icepop", "token_mask", "sequence_mask", "geometric_mask"), cfg.mode
        cut = (rho < cfg.low) | (rho > cfg.high)
        weight = torch.where(cut, 0.0, rho if cfg.mode == "icepop" else 1.0).to(rho.dtype)
    return weight, {"correction_weight": weight, "correction_cut": cut.to(rho.dtype)}
