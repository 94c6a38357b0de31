"""How far the trainer's log-probabilities are from the engine's, for the same weights and tokens.

Both should be equal; the difference is numerics (kernels, dtypes, batching). When it grows, samples are no longer on-policy even at
the first optimizer step.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from megaflow.types import Stats

LOG_RATIO_LIMIT = 20.0  # the square of e^20 is still finite in fp32


def mismatch_per_token(old_logp: Tensor, rollout_logp: Tensor) -> dict[str, Tensor]:
    """By metric, one value per response token, [R] -> [R].

    logp_abs_diff: |trainer - engine|. k3: Schulman's estimate of KL(engine || trainer); the tokens were drawn from the engine.
    ratio: rho = trainer's probability / engine's; its mean is 1 in expectation. chi2: rho^2 - 1, whose mean estimates
    chi2(trainer || engine). Both with log rho limited to [-20, 20].
    """
    difference = (old_logp - rollout_logp).float()
    bounded = difference.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    return {
        "logp_abs_diff": difference.abs(),
        "k3": torch.expm1(difference) - difference,
        "ratio": bounded.exp(),
        "chi2": torch.expm1(2 * bounded),
    }


def effective_sample_size(mean_ratio: float, mean_chi2: float) -> float:
    """The part of the tokens that an importance-weighted mean is worth, (mean rho)^2 / mean(rho^2), of (0, 1] (Kish 1965)."""
    return mean_ratio**2 / (1.0 + mean_chi2)


def mismatch(old_logp: Sequence[Tensor], rollout_logp: Sequence[Tensor]) -> Stats:
    """`mismatch/*`, by the names above: means over all tokens of the sequences given, each [R_i]. NaN if there are none."""
    if not len(old_logp):
        return dict.fromkeys((f"mismatch/{name}" for name in mismatch_per_token(torch.zeros(0), torch.zeros(0))), float("nan"))
    per_token = mismatch_per_token(torch.cat(list(old_logp)), torch.cat(list(rollout_logp)))
    return {f"mismatch/{name}": value.double().mean().item() for name, value in per_token.items()}
