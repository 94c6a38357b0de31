"""The logic block: what rank 0 decides about a step's samples. Plain functions on plain numbers, no process group in sight."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from megaflow.algo import ADVANTAGES
from megaflow.algo.filters import uniform_groups
from megaflow.config.schema import Config
from megaflow.rewards import RewardPool
from megaflow.types import ConfigError, Sample, Stats


@dataclass(frozen=True)
class Decision:
    """About one sample that is trained on."""

    reward: float
    advantage: float
    mini_batch: int


@dataclass
class Batch:
    """decisions: (group, index) -> Decision; samples that are not in it are left out of the update."""

    decisions: dict[tuple[int, int], Decision] = field(default_factory=dict)
    stats: Stats = field(default_factory=dict)


def make_batch(samples: list[Sample], rewards: RewardPool, cfg: Config) -> Batch:
    """Rewards, advantages, filters and mini batches for all samples of a step, in (group, index) order. Runs on rank 0."""
    rewards.score(samples)
    stats = reward_stats(samples, rewards.counts) | rollout_stats(samples)
    values = torch.tensor([s.reward for s in samples], dtype=torch.float64)  # [N]
    groups = torch.tensor([s.group for s in samples])
    shaped = values.clone()
    if cfg.algo.kl.where == "reward":
        kl = torch.tensor([s.sums["ref_kl"] for s in samples], dtype=torch.float64)
        shaped -= cfg.algo.kl.coef * kl
        stats["reward/kl_penalty"] = float(cfg.algo.kl.coef * kl.mean())
    estimator = ADVANTAGES.get(cfg.algo.advantage)
    if getattr(estimator, "needs_tokens", False):
        raise ConfigError(f"algo.advantage={cfg.algo.advantage} reads token-level tensors (needs_tokens), which is not supported yet")
    lengths = {"lengths": torch.tensor([s.num_response for s in samples])} if getattr(estimator, "needs_lengths", False) else {}
    advantages = estimator(shaped, groups, cfg.algo, **lengths)  # [N]
    uniform = uniform_groups(values, groups)
    stats["reward/uniform_groups"] = float(uniform.double().mean())
    kept = [i for i in range(len(samples)) if not (cfg.algo.drop_uniform and uniform[i])]
    size = cfg.actor.mini_batch or len(samples)
    batch = Batch(stats=stats)
    for position, i in enumerate(kept):
        s = samples[i]
        s.advantage = float(advantages[i])
        batch.decisions[s.group, s.index] = Decision(s.reward, s.advantage, position // size)
    return batch


def apply_decisions(samples: list[Sample], batch: Batch) -> list[Sample]:
    """The samples that are trained on, with what was decided about them."""
    kept = []
    for s in samples:
        decision = batch.decisions.get((s.group, s.index))
        if decision is not None:
            s.reward, s.advantage, s.mini_batch = decision.reward, decision.advantage, decision.mini_batch
            kept.append(s)
    return kept


def reward_stats(samples: list[Sample], counts: dict[str, int]) -> Stats:
    """reward/*: mean, standard deviation, each function's mean, and how many samples' functions failed."""
    values = torch.tensor([s.reward for s in samples], dtype=torch.float64)
    stats = {"reward/mean": float(values.mean()), "reward/std": float(values.std(correction=0))}
    for name in sorted({n for s in samples for n in s.reward_parts}):
        parts = [s.reward_parts[name] for s in samples if name in s.reward_parts]
        stats[f"reward/{name}"] = sum(parts) / len(parts)
    return {**stats, "reward/failed": float(counts["failed"]), "reward/timeout": float(counts["timeout"])}


def rollout_stats(samples: list[Sample]) -> Stats:
    """rollout/* lengths, and the difference between the trainer's and the engine's log-probabilities, over all response tokens."""
    lengths = [s.num_response for s in samples]
    tokens = max(sum(lengths), 1)
    stats = {
        "rollout/len_mean": sum(lengths) / len(samples),
        "rollout/len_max": float(max(lengths)),
        "rollout/truncated": sum(s.finish == "length" for s in samples) / len(samples),
        "rollout/tokens": float(sum(lengths)),
        "batch/tokens": float(sum(s.num_tokens for s in samples)),
    }
    for name in sorted({n for s in samples for n in s.sums if n.startswith("mismatch/")}):
        stats[name] = sum(s.sums[name] for s in samples) / tokens
    return stats


def accuracy(samples: list[Sample], rewards: RewardPool) -> tuple[float, float]:
    """Of an evaluation: (mean of the first reward function, mean reward). Runs on rank 0."""
    scored = rewards.score(samples)
    first = [next(iter(s.parts.values())) if s.parts else 0.0 for s in scored]
    return sum(first) / len(first), sum(s.reward for s in scored) / len(scored)
