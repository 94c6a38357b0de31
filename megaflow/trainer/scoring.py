"""Rewards of samples: from the engines' ranks to rank 0's workers, and back to where the samples are."""

from __future__ import annotations

from megaflow.config.schema import Config
from megaflow.parallel.mesh import Mesh
from megaflow.rewards import RewardPool
from megaflow.trainer.mesh_scorer import MeshScorer
from megaflow.types import Sample

Scores = dict[tuple[int, int], tuple[float, dict[str, float]]]  # (group, index) -> reward and its parts


def score(
    mesh: Mesh, rewards: RewardPool | None, samples: list[Sample], model: MeshScorer | None = None, may_all_fail: bool = False
) -> tuple[list[Sample], dict[str, int]]:
    """Collective. Write reward and reward_parts to each rank's own samples.

    Returns on rank 0 all ranks' samples, scored, in (group, index) order and without token tensors (elsewhere none); and how many rewards
    failed, by kind. may_all_fail: see RewardPool.score.
    """
    if model is not None:
        model.score(samples)  # C
    rows = mesh.gather_from_engines(samples)
    scores, counts = mesh.on_rank0(_score, rows, rewards, may_all_fail)  # 0
    for sample in samples:
        sample.reward, sample.reward_parts = scores[sample.group, sample.index]
    return rows, counts


def _score(rows: list[Sample], rewards: RewardPool, may_all_fail: bool) -> tuple[Scores, dict[str, int]]:
    rewards.score(rows, learn=True, may_all_fail=may_all_fail)
    return {(row.group, row.index): (row.reward, row.reward_parts) for row in rows}, dict(rewards.counts)


def is_solved(sample: Sample, cfg: Config) -> bool:
    """Whether the first reward function gave at least reward.solved. A sample whose function failed is not solved."""
    return bool(sample.reward_parts) and next(iter(sample.reward_parts.values())) >= cfg.reward.solved
