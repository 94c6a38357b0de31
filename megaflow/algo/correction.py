"""Weights that make up for the difference between the distribution that sampled (the engine's) and the trainer's.

Both hold the same weights, yet their kernels, dtypes and batching differ, so tokens are drawn from a slightly other distribution than
the one that is differentiated. With rho = exp(old_logp - rollout_logp) at each token, a correction multiplies the policy loss by

    token_tis       min(rho_t, high)                          truncated importance sampling
    sequence_tis    min(prod of the sequence's rho, high)     the same, for whole sequences
    geometric_tis   min(prod of rho ** (1 / length), high)    the same by the geometric mean, which does not drift with length
    icepop          rho_t if low <= rho_t <= high, else 0     (arXiv:2510.18855, section 2.3.2)
    token_mask      1 if low <= rho_t <= high, else 0
    sequence_mask   1 if low <= prod of rho <= high, else 0   the whole sequence is kept or left out
    geometric_mask  the same by the geometric mean

and `reject`, with any of these or with none, by 0 for all tokens of a sequence that is an outlier: whose product (sequence) or geometric
mean (geometric) is out of [reject_low, reject_high], or any one of whose tokens is (worst).

TIS: F. Yao et al., "Your Efficient RL Framework Secretly Brings You Off-Policy RL Training" (2025); Ionides (2008) for the truncation.
Sequence and geometric masks, rejection: J. Liu, Y. Li et al., "When Speed Kills Stability: Demystifying RL Collapse from the
Training-Inference Mismatch" (2025). Their masked importance sampling has the product itself as weight: sequence_tis and reject.
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

    old_logp, rollout_logp [R]: of the same tokens, the trainer's before the update and the engine's.
    Stats: correction_weight, the factor; correction_cut, 1 where a bound was passed (truncated, masked or rejected), else 0.
    """
    log_rho = old_logp - rollout_logp
    weight, cut = _by_mode(log_rho, seq_index, num_seqs, cfg)
    if cfg.reject != "none":
        rejected = _outliers(log_rho, seq_index, num_seqs, cfg)[seq_index]
        weight, cut = torch.where(rejected, torch.zeros_like(weight), weight), cut | rejected
    return weight, {"correction_weight": weight, "correction_cut": cut.to(weight.dtype)}


@torch.no_grad()
def left_out(old_logp: Tensor, rollout_logp: Tensor, seq_index: Tensor, num_seqs: int, cfg: CorrectionConfig) -> Tensor:
    """The sequences whose policy loss is 0 as a whole, by `reject` or by a mask of sequences -> [n] bool."""
    log_rho = old_logp - rollout_logp
    out = torch.zeros(num_seqs, dtype=torch.bool, device=log_rho.device)
    if cfg.mode in ("sequence_mask", "geometric_mask"):
        out |= _outside(_per_sequence(log_rho, seq_index, num_seqs, cfg.mode.removesuffix("_mask")), cfg.low, cfg.high)
    if cfg.reject != "none":
        out |= _outliers(log_rho, seq_index, num_seqs, cfg)
    return out


def _by_mode(log_rho: Tensor, seq_index: Tensor, num_seqs: int, cfg: CorrectionConfig) -> tuple[Tensor, Tensor]:
    """(weight [R], where a bound of the mode was passed [R] bool)."""
    if cfg.mode == "none":
        return torch.ones_like(log_rho), torch.zeros_like(log_rho, dtype=torch.bool)
    level, _, kind = cfg.mode.rpartition("_")
    if level in ("sequence", "geometric"):
        log_rho = _per_sequence(log_rho, seq_index, num_seqs, level)[seq_index].to(log_rho.dtype)
    rho = _exp(log_rho)
    if kind == "tis":
        return rho.clamp(max=cfg.high), rho > cfg.high
    assert kind in ("mask", "icepop"), cfg.mode
    cut = _outside(log_rho, cfg.low, cfg.high)
    return torch.where(cut, 0.0, rho if kind == "icepop" else 1.0).to(rho.dtype), cut


def _outliers(log_rho: Tensor, seq_index: Tensor, num_seqs: int, cfg: CorrectionConfig) -> Tensor:
    """Sequences that `reject` leaves out -> [n] bool."""
    if cfg.reject == "worst":
        return sums(_outside(log_rho, cfg.reject_low, cfg.reject_high), seq_index, num_seqs) > 0
    return _outside(_per_sequence(log_rho, seq_index, num_seqs, cfg.reject), cfg.reject_low, cfg.reject_high)


def _per_sequence(log_rho: Tensor, seq_index: Tensor, num_seqs: int, level: str) -> Tensor:
    """Log of the product of each sequence's ratios, or of their geometric mean -> [n] float64."""
    return (sums if level == "sequence" else means)(log_rho, seq_index, num_seqs)


def _outside(log_rho: Tensor, low: float, high: float) -> Tensor:
    rho = _exp(log_rho)
    return (rho < low) | (rho > high)


def _exp(log_rho: Tensor) -> Tensor:
    return log_rho.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp()
