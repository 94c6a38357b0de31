"""How far the trainer's log-probabilities are from the engine's, for the same weights and tokens.

Both should be equal; the difference is numerics (kernels, dtypes, batching). When it grows, samples are no longer on-policy even at
the first optimizer step. A rank sums over the tokens of each of its sequences, rank 0 makes the step's figures of all sums.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from megaflow.algo.correction import left_out
from megaflow.config.schema import CorrectionConfig
from megaflow.types import Stats

LOG_RATIO_LIMIT = 20.0  # the square of e^20 is still finite in fp32
NAMES = ("logp_abs_diff", "kl", "k3", "ratio", "chi2", "ess", "ratio_max", "ratio_min", "chi2_seq")


def mismatch_per_token(old_logp: Tensor, rollout_logp: Tensor) -> dict[str, Tensor]:
    """By name, one value per response token, [R] -> [R].

    logp_abs_diff: |trainer - engine|. kl, k3: two of Schulman's estimates of KL(engine || trainer); the tokens were drawn from the engine.
    ratio: rho = trainer's probability / engine's; its mean is 1 in expectation. chi2: rho^2 - 1, whose mean estimates
    chi2(trainer || engine). Both with log rho limited to [-20, 20].
    """
    difference = (old_logp - rollout_logp).float()
    bounded = difference.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    return {
        "logp_abs_diff": difference.abs(),
        "kl": -difference,
        "k3": torch.expm1(difference) - difference,
        "ratio": bounded.exp(),
        "chi2": torch.expm1(2 * bounded),
    }


def mismatch_of_sequence(old_logp: Tensor, rollout_logp: Tensor, cfg: CorrectionConfig) -> Stats:
    """Of one sequence, [R] each, under `mismatch.<name>`: the above summed over its tokens, logs of its largest and smallest ratio, and,
    if `cfg` can leave whole sequences out, whether it is left out."""
    found = {name: float(value.double().sum()) for name, value in mismatch_per_token(old_logp, rollout_logp).items()}
    log_rho = (old_logp - rollout_logp).float().clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    found["log_max"], found["log_min"] = (float(log_rho.max()), float(log_rho.min())) if len(log_rho) else (0.0, 0.0)
    if cfg.reject != "none" or cfg.mode in ("sequence_mask", "geometric_mask"):
        index = torch.zeros(len(log_rho), dtype=torch.int64)
        found["rejected"] = float(left_out(old_logp, rollout_logp, index, 1, cfg)[0])
    return {f"mismatch.{name}": value for name, value in found.items()}


def mismatch_of_step(sequences: Sequence[Stats], num_tokens: int) -> Stats:
    """`mismatch/*` of a step, of what mismatch_of_sequence found for each of its sequences, which have num_tokens response tokens in all.

    Means over tokens; ess: the part of the tokens that an importance-weighted mean is worth, (mean rho)^2 / mean(rho^2), of (0, 1] (Kish
    1965); ratio_max and ratio_min of all tokens; chi2_seq: the mean over sequences of (product of rho)^2 - 1; rejected: part of the
    sequences. NaN without tokens; empty without sequences.
    """
    if not sequences:
        return {}
    if not num_tokens:
        return {f"mismatch/{name}": float("nan") for name in NAMES}
    columns = {name: torch.tensor([each[name] for each in sequences], dtype=torch.float64) for name in sequences[0]}
    out = {f"mismatch/{n}": float(columns[f"mismatch.{n}"].sum() / num_tokens) for n in ("logp_abs_diff", "kl", "k3", "ratio", "chi2")}
    out["mismatch/ess"] = effective_sample_size(out["mismatch/ratio"], out["mismatch/chi2"])
    out["mismatch/ratio_max"] = float(columns["mismatch.log_max"].max().exp())
    out["mismatch/ratio_min"] = float(columns["mismatch.log_min"].min().exp())
    products = -columns["mismatch.kl"].clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)  # kl is the sum of -log rho
    out["mismatch/chi2_seq"] = float(torch.expm1(2 * products).mean())
    if "mismatch.rejected" in columns:
        out["mismatch/rejected"] = float(columns["mismatch.rejected"].mean())
    return out


def effective_sample_size(mean_ratio: float, mean_chi2: float) -> float:
    """(mean rho)^2 / mean(rho^2), mean_chi2 being mean(rho^2) - 1. At most 1, which rounding may pass."""
    return min(1.0, mean_ratio**2 / (1.0 + mean_chi2))
