"""How far the trainer's log-probabilities are from the engine's, for the same weights and tokens.

Both should be equal; the difference is numerics (kernels, dtypes, batching). When it grows, samples are no longer on-policy even at
the first optimizer step.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from megaflow.types import Stats


def mismatch_per_token(old_logp: Tensor, rollout_logp: Tensor) -> dict[str, Tensor]:
    """By metric, one value per response token, [R] -> [R].

    logp_abs_diff: |trainer - engine|. k3: Schulman's estimate of KL(engine || trainer); the tokens were drawn from the engine.
    """
    difference = (old_logp - rollout_logp).float()
    return {"logp_abs_diff": difference.abs(), "k3": torch.expm1(difference) - difference}


def mismatch(old_logp: Sequence[Tensor], rollout_logp: Sequence[Tensor]) -> Stats:
    """`mismatch/logp_abs_diff` and `mismatch/k3`: means over all tokens of the sequences given, each [R_i]. NaN if there are none."""
    if not len(old_logp):
        return {"mismatch/logp_abs_diff": float("nan"), "mismatch/k3": float("nan")}
    per_token = mismatch_per_token(torch.cat(list(old_logp)), torch.cat(list(rollout_logp)))
    return {f"mismatch/{name}": value.double().mean().item() for name, value in per_token.items()}
