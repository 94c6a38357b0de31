"""The logic block: what rank 0 decides about a step's samples. Plain functions on plain numbers, no process group in sight."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from megaflow.algo import ADVANTAGES
from megaflow.algo.filters import uniform_groups
from megaflow.algo.mismatch import mismatch_of_step
from megaflow.algo.shaping import length_shaping
from megaflow.config.schema import Config
from megaflow.trainer.scoring import is_solved
from megaflow.trainer.token_advantages import token_advantages
from megaflow.types import Sample, Stats


@dataclass(frozen=True)
class Decision:
    """About one sample that is trained on."""

    reward: float
    advantage: float | Tensor  # [R] from an estimator that reads tokens
    mini_batch: int
    returns: Tensor | None = None  # [R], with a critic


@dataclass
class Batch:
    """decisions: (group, index) -> Decision; samples that are not in it are left out of the update."""

    decisions: dict[tuple[int, int], Decision] = field(default_factory=dict)
    stats: Stats = field(default_factory=dict)


def make_batch(samples: list[Sample], cfg: Config) -> Batch:
    """Advantages, filters and mini batches for all samples of a step, which are scored and in (group, index) order. Runs on rank 0."""
    stats = reward_stats(samples) | rollout_stats(samples)
    values = torch.tensor([s.reward for s in samples], dtype=torch.float64)  # [N]
    groups = torch.tensor([s.group for s in samples])
    estimator = ADVANTAGES.get(cfg.algo.advantage)
    by_token = getattr(estimator, "needs_tokens", False)
    shaped = values.clone()
    for name, term in length_terms(samples, groups, cfg).items():
        shaped += term
        stats[f"reward/{name}"] = float(term.mean())
    if cfg.algo.kl.where == "reward":
        kl = torch.tensor([s.sums["ref_kl"] for s in samples], dtype=torch.float64)
        shaped -= 0 if by_token else cfg.algo.kl.coef * kl
        stats["reward/kl_penalty"] = float(cfg.algo.kl.coef * kl.mean())
    returns: list[Tensor] | None = None
    if by_token:
        found, value_stats = token_advantages(estimator, samples, shaped, groups, cfg, cfg.algo.kl.coef)
        advantages, returns, stats = found.advantages, found.returns, stats | value_stats
    else:
        advantages = estimator(shaped, groups, cfg.algo, **needs(estimator, samples)).tolist()  # [N]
    uniform = uniform_groups(values, groups)
    stats["reward/uniform_groups"] = float(uniform.double().mean())
    kept = [i for i, s in enumerate(samples) if not (cfg.algo.drop_uniform and uniform[i]) and not is_filtered(s, cfg)]
    stats["batch/left_out"] = 1.0 - len(kept) / len(samples)
    size = cfg.actor.mini_batch or len(samples)
    batch = Batch(stats=stats)
    for position, i in enumerate(kept):
        s = samples[i]
        s.advantage = advantages[i]
        batch.decisions[s.group, s.index] = Decision(s.reward, s.advantage, position // size, returns[i] if returns else None)
    return batch


def length_terms(samples: list[Sample], groups: Tensor, cfg: Config) -> dict[str, Tensor]:
    """By name (overlong, length) what the responses' lengths add to the rewards, each [N]."""
    lengths = torch.tensor([s.num_response for s in samples])
    solved = torch.tensor([is_solved(s, cfg) for s in samples])
    return length_shaping(groups, lengths, solved, cfg.algo, cfg.sampling.max_new_tokens)


def needs(estimator: Callable[..., Tensor], samples: list[Sample]) -> dict[str, Tensor]:
    """The columns [N] beside the rewards that an advantage function says it needs."""
    given = {}
    if getattr(estimator, "needs_lengths", False):
        given["lengths"] = torch.tensor([s.num_response for s in samples])
    if getattr(estimator, "needs_greedy", False):
        given["baseline"] = torch.tensor([s.baseline for s in samples], dtype=torch.float64)
    return given


def is_filtered(sample: Sample, cfg: Config) -> bool:
    """Whether a truncated response stays out of the loss (DAPO's overlong filtering)."""
    return cfg.algo.overlong.filter and sample.finish == "length"


def apply_decisions(samples: list[Sample], batch: Batch) -> list[Sample]:
    """The samples that are trained on, with what was decided about them."""
    kept = []
    for s in samples:
        decision = batch.decisions.get((s.group, s.index))
        if decision is not None:
            s.reward, s.advantage, s.mini_batch = decision.reward, decision.advantage, decision.mini_batch
            s.returns = decision.returns
            kept.append(s)
    return kept


def reward_stats(samples: list[Sample]) -> Stats:
    """reward/*: mean, standard deviation and each function's mean."""
    values = torch.tensor([s.reward for s in samples], dtype=torch.float64)
    stats = {"reward/mean": float(values.mean()), "reward/std": float(values.std(correction=0))}
    for name in sorted({n for s in samples for n in s.reward_parts}):
        parts = [s.reward_parts[name] for s in samples if name in s.reward_parts]
        stats[f"reward/{name}"] = sum(parts) / len(parts)
    return stats


def rollout_stats(samples: list[Sample]) -> Stats:
    """rollout/* lengths, and the difference between the trainer's and the engine's log-probabilities, over all response tokens."""
    lengths = [s.num_response for s in samples]
    stats = {
        "rollout/len_mean": sum(lengths) / len(samples),
        "rollout/len_max": float(max(lengths)),
        "rollout/truncated": sum(s.finish == "length" for s in samples) / len(samples),
        "rollout/tokens": float(sum(lengths)),
        "batch/tokens": float(sum(s.num_tokens for s in samples)),
    }
    if all("ref_kl" in s.sums for s in samples):
        stats["algo/ref_kl"] = sum(s.sums["ref_kl"] for s in samples) / max(sum(lengths), 1)
    return stats | mismatch_of_step([s.sums for s in samples if "mismatch.k3" in s.sums], sum(lengths))
