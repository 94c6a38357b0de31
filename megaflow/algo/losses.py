"""Policy losses, one number per response token. Masks, weights and sums are not here: see aggregation.py.

A loss is `fn(logp, inputs, cfg) -> (per_token, stats)`; every tensor is [R], the response tokens of all sequences of a pack in a row.
Throughout, A is the advantage and ratio = exp(logp - old_logp). Stats of all losses here:

    ratio      what the loss uses as ratio (gspo: the sequence's)
    clip_frac  1 where a clip decides, else 0; each loss says which. 0 everywhere in losses without a clip
    kl         k3 estimate of KL(old || new), how far this update has gone: ratio - 1 - log ratio, always of the token's own ratio
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from megaflow.algo import LOSSES
from megaflow.algo.correction import correction
from megaflow.algo.covariance import Choice, largest, within_bounds_at_random
from megaflow.algo.kl import kl_estimate
from megaflow.algo.per_sequence import means
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
    marked: Tensor | None = None  # [R] bool, the tokens that the loss's `choice` has picked; needed when it has one


Loss = Callable[[Tensor, LossInputs, AlgoConfig], tuple[Tensor, dict[str, Tensor]]]


def ppo_clip(logp: Tensor, inputs: LossInputs, cfg: AlgoConfig) -> tuple[Tensor, dict[str, Tensor]]:
    """The clipped surrogate: -min(ratio * A, clip(ratio, 1 - low, 1 + high) * A).

    PPO (arXiv:1707.06347) equation 7; bounds that differ: DAPO's clip-higher (arXiv:2503.14476) equation 10.
    clip_frac: the clip has taken the gradient away, A > 0 and ratio > 1 + high, or A < 0 and ratio < 1 - low.
    (A ratio out of bounds on the *other* side keeps its gradient, and is not counted.)
    """
    log_ratio = _log_ratio(logp, inputs)
    ratio = log_ratio.exp()
    per_token, clipped = _clipped_surrogate(ratio, inputs.advantage, cfg)
    return per_token, _stats(ratio, clipped, log_ratio)


def dual_clip(logp: Tensor, inputs: LossInputs, cfg: AlgoConfig) -> tuple[Tensor, dict[str, Tensor]]:
    """ppo_clip whose loss, where A < 0, is at most clip.dual * |A|: a token that the policy now likes far more cannot blow up the step.

    Ye et al. (arXiv:1912.09729) equation 5; dual = 3 is verl's.
    clip_frac: as for ppo_clip, and where A < 0 and ratio > clip.dual.
    """
    log_ratio = _log_ratio(logp, inputs)
    ratio, advantage = log_ratio.exp(), inputs.advantage
    per_token, clipped = _clipped_surrogate(ratio, advantage, cfg)
    per_token = torch.where(advantage < 0, torch.minimum(per_token, -cfg.clip.dual * advantage), per_token)
    return per_token, _stats(ratio, clipped | ((advantage < 0) & (ratio > cfg.clip.dual)), log_ratio)


def policy_gradient(logp: Tensor, inputs: LossInputs, cfg: AlgoConfig) -> tuple[Tensor, dict[str, Tensor]]:
    """-A * logp (REINFORCE, Williams 1992). It knows no old policy: from the second optimizer step on the same samples it is biased."""
    log_ratio = _log_ratio(logp.detach(), inputs)
    return -inputs.advantage * logp, _stats(log_ratio.exp(), torch.zeros_like(logp, dtype=torch.bool), log_ratio)


def gspo(logp: Tensor, inputs: LossInputs, cfg: AlgoConfig) -> tuple[Tensor, dict[str, Tensor]]:
    """ppo_clip with the sequence's ratio at each of its tokens: s = exp(mean over the sequence of logp - old_logp).

    The token form of the paper: s_t = sg[s] * pi_t / sg[pi_t] has the value of s, and each token the gradient of its own logp. Under
    aggregation=sequence both value and gradient are those of GSPO itself. s stays close to 1, so bounds are small: 3e-4 and 4e-4 there.

    GSPO (arXiv:2507.18071) equations 5, 7, 13 and 14. clip_frac: as for ppo_clip, by s.
    """
    log_ratio = _log_ratio(logp, inputs)
    mean = means((logp - inputs.old_logp).detach(), inputs.seq_index, inputs.num_seqs)[inputs.seq_index].to(logp.dtype)  # [R]
    ratio = (mean.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT) + (logp - logp.detach())).exp()
    per_token, clipped = _clipped_surrogate(ratio, inputs.advantage, cfg)
    return per_token, _stats(ratio, clipped, log_ratio)


def cispo(logp: Tensor, inputs: LossInputs, cfg: AlgoConfig) -> tuple[Tensor, dict[str, Tensor]]:
    """-sg[clip(ratio, 1 - low, 1 + high)] * A * logp: the weight is clipped, no token's gradient is dropped.

    MiniMax-M1 (arXiv:2506.13585) equations 4 and 5, where only the upper bound is used: clip.low = 1.
    clip_frac: the weight has been clipped, whatever the sign of A.
    """
    log_ratio = _log_ratio(logp.detach(), inputs)
    ratio = log_ratio.exp()
    weight = ratio.clamp(1.0 - cfg.clip.low, 1.0 + cfg.clip.high)
    return -weight * inputs.advantage * logp, _stats(ratio, weight != ratio, log_ratio)


def sapo(logp: Tensor, inputs: LossInputs, cfg: AlgoConfig) -> tuple[Tensor, dict[str, Tensor]]:
    """-4 / tau * sigmoid(tau * (ratio - 1)) * A, tau = sapo.tau_pos where A > 0, else sapo.tau_neg: a gate instead of a clip.

    Its gradient is that of policy_gradient at ratio 1 and fades smoothly on both sides, faster with larger tau.
    Soft Adaptive Policy Optimization (arXiv:2511.20347) equations 5 and 6.
    """
    log_ratio = _log_ratio(logp, inputs)
    ratio = log_ratio.exp()
    tau = torch.full_like(inputs.advantage, cfg.sapo.tau_neg).masked_fill(inputs.advantage > 0, cfg.sapo.tau_pos)
    per_token = -4.0 / tau * torch.sigmoid(tau * (ratio - 1.0)) * inputs.advantage
    return per_token, _stats(ratio, torch.zeros_like(ratio, dtype=torch.bool), log_ratio)


def clip_cov(logp: Tensor, inputs: LossInputs, cfg: AlgoConfig) -> tuple[Tensor, dict[str, Tensor]]:
    """ppo_clip, and the marked tokens, a few of those of high covariance, have no gradient.

    Clip-Cov (arXiv:2505.22617) equations 11 and 12; see covariance.py. Stats, beside those of ppo_clip: cov_marked, 1 for a marked token.
    """
    per_token, stats = ppo_clip(logp, inputs, cfg)
    marked = _marked(inputs)
    return torch.where(marked, torch.zeros_like(per_token), per_token), stats | {"cov_marked": marked.to(logp.dtype)}


def kl_cov(logp: Tensor, inputs: LossInputs, cfg: AlgoConfig) -> tuple[Tensor, dict[str, Tensor]]:
    """-ratio * A without a clip; the marked tokens, those of largest covariance, also pay cov.kl_coef * |logp - old_logp|.

    KL-Cov (arXiv:2505.22617) equations 13 and 14. The distance to the old policy is the absolute one, as in the paper's listing 1: at the
    first optimizer step, where ratio = 1, it pulls nowhere. Stats: cov_marked as in clip_cov; clip_frac is 0.
    """
    log_ratio = _log_ratio(logp, inputs)
    ratio, marked = log_ratio.exp(), _marked(inputs)
    per_token = -ratio * inputs.advantage + torch.where(marked, cfg.cov.kl_coef * log_ratio.abs(), torch.zeros_like(ratio))
    stats = _stats(ratio, torch.zeros_like(marked), log_ratio)
    return per_token, stats | {"cov_marked": marked.to(logp.dtype)}


clip_cov.choice = Choice(within_bounds_at_random, lambda cfg: cfg.cov.clip_ratio)
kl_cov.choice = Choice(largest, lambda cfg: cfg.cov.kl_ratio)


def _marked(inputs: LossInputs) -> Tensor:
    assert inputs.marked is not None, "a loss with a `choice` needs LossInputs.marked"
    return inputs.marked


def _log_ratio(logp: Tensor, inputs: LossInputs) -> Tensor:
    return (logp - inputs.old_logp).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)


def _clipped_surrogate(ratio: Tensor, advantage: Tensor, cfg: AlgoConfig) -> tuple[Tensor, Tensor]:
    """(-min(ratio * A, clip(ratio) * A), where the clip has taken the gradient away)."""
    low, high = 1.0 - cfg.clip.low, 1.0 + cfg.clip.high
    clipped = ((advantage > 0) & (ratio > high)) | ((advantage < 0) & (ratio < low))
    return -torch.minimum(ratio * advantage, ratio.clamp(low, high) * advantage), clipped


@torch.no_grad()
def _stats(ratio: Tensor, clipped: Tensor, log_ratio: Tensor) -> dict[str, Tensor]:
    kl = torch.expm1(log_ratio) - log_ratio
    return {"ratio": ratio.detach(), "clip_frac": clipped.to(ratio.dtype), "kl": kl.detach()}


def objective(logp: Tensor, entropy: Tensor | None, inputs: LossInputs, cfg: AlgoConfig) -> tuple[Tensor, dict[str, Tensor]]:
    """What is minimised for each token: the loss named by cfg.loss, plus kl.coef * KL to the reference, minus the entropy bonus.

    cfg.correction weighs the first of the three only. With cfg.aggregation = "sequence_sum" the whole is divided by
    cfg.length_constant here, and by the number of sequences in token_weights, which knows no configuration.

    logp [R] with gradient; entropy [R] of the policy at each token, with gradient if cfg.entropy > 0 (None: not measured).
    Returns (per_token [R], stats of [R] without gradients); `ref_kl` and `entropy` are among the stats when they are known.
    """
    per_token, stats = LOSSES.get(cfg.loss)(logp, inputs, cfg)
    if cfg.correction.mode != "none" or cfg.correction.reject != "none":
        weight, measured = correction(inputs.old_logp, inputs.rollout_logp, inputs.seq_index, inputs.num_seqs, cfg.correction)
        per_token, stats = weight * per_token, stats | measured
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
    if cfg.aggregation == "sequence_sum":
        per_token = per_token / cfg.length_constant
    return per_token, stats
