"""Estimators of KL(policy || reference) from the log-probabilities of sampled tokens.

J. Schulman, "Approximating KL Divergence", http://joschu.net/blog/kl-approx.html. With x drawn from the policy and r = ref(x) / policy(x):

    k1 = -log r              unbiased, high variance, may be negative
    k2 = (log r)^2 / 2       biased, low variance
    k3 = (r - 1) - log r     unbiased, low variance, never negative
    abs = |log r|            biased; not an estimate of a KL, but a distance of the same kind that no single token dominates

Their gradients with respect to the policy's log-probability are 1, -log r and 1 - r. As a *loss* term: the expectation of k1's is
zero (it pulls nowhere), of k2's it is that of KL(policy || reference), of k3's that of KL(reference || policy).
k1+ and k3+ have the value of k1 and k3 and, straight through, the gradient of k2: an unbiased value, and a gradient that is one of
KL(policy || reference) in expectation (as verl's estimators with a plus; Tang and Munos, arXiv:2506.09477, on why it matters).
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

# Bounds of verl's low_var_kl, so that its recipes give the same numbers here. One token that the policy has all but given up
# (r = e^20) would otherwise outweigh a whole batch. Beyond a bound the gradient is zero.
LOG_RATIO_LIMIT = 20.0
K3_LIMIT = 10.0

Estimator = Literal["k1", "k2", "k3", "abs", "k1+", "k3+"]


def kl_estimate(logp: Tensor, ref_logp: Tensor, estimator: Estimator) -> Tensor:
    """The estimate for each token, differentiable in `logp`.

    logp, ref_logp: [R] of the sampled tokens -> [R], in nats. k3 clamps log r to [-20, 20] and its value to at most 10.
    """
    log_r = ref_logp - logp
    if estimator in ("k1+", "k3+"):
        value, gradient = kl_estimate(logp, ref_logp, estimator[:-1]).detach(), 0.5 * log_r.square()  # type: ignore[arg-type]
        return value + (gradient - gradient.detach())
    if estimator == "abs":
        return log_r.abs()
    if estimator == "k1":
        return -log_r
    if estimator == "k2":
        return 0.5 * log_r.square()
    assert estimator == "k3", estimator
    log_r = log_r.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    return (torch.expm1(log_r) - log_r).clamp(max=K3_LIMIT)  # expm1: r - 1 has no correct digits left where r is nearly 1
