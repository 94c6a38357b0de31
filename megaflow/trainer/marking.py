"""Tokens that a loss chooses among all of a mini batch, over all ranks, before the update (algo/covariance.py)."""

from __future__ import annotations

import torch
from torch import Tensor

from megaflow.algo import LOSSES
from megaflow.algo import covariance as cov
from megaflow.config.schema import AlgoConfig
from megaflow.parallel.mesh import Mesh
from megaflow.types import Sample


def mark_tokens(mesh: Mesh, samples: list[Sample], cfg: AlgoConfig, seed: tuple[int, int]) -> None:
    """Collective. Sets `marked` of each sample [R] bool if the loss named by cfg.loss has a `choice`.

    seed: the run's and the step's number. The result does not depend on which rank holds which sample.
    """
    choice = getattr(LOSSES.get(cfg.loss), "choice", None)
    if choice is None:
        return
    for s in samples:
        s.marked = torch.zeros(s.num_response, dtype=torch.bool)
    numbers = sorted({n for found in mesh.all_gather(sorted({s.mini_batch for s in samples})) for n in found})
    for number in numbers:
        _mark_mini_batch(mesh, [s for s in samples if s.mini_batch == number], choice, cfg, seed)


def _mark_mini_batch(mesh: Mesh, mine: list[Sample], choice: cov.Choice, cfg: AlgoConfig, seed: tuple[int, int]) -> None:
    own = {
        "tokens": float(sum(s.num_response for s in mine)),
        "logp": float(sum(s.old_logp.double().sum() for s in mine)),
        "advantage": float(sum(_advantage(s).sum() for s in mine)),
    }
    total = mesh.sum(own)
    if not total["tokens"]:
        return
    count = choice.count(int(total["tokens"]), cfg)
    mean_logp, mean_advantage = total["logp"] / total["tokens"], total["advantage"] / total["tokens"]
    is_leader = mesh.rank == mesh.replicas[mesh.dp.index][0]  # the other ranks of a replica hold the same samples
    rows = torch.cat([torch.zeros(0, 4, dtype=torch.float64)] + [_rows(s, choice, cfg, seed, mean_logp, mean_advantage) for s in mine])
    chosen = cov.best(torch.cat(mesh.all_gather(cov.best(rows, count) if is_leader else rows[:0])), count)
    places = {(s.group, s.index): s for s in mine}
    for _, group, index, position in chosen.tolist():
        if (int(group), int(index)) in places:
            places[int(group), int(index)].marked[int(position)] = True


def _rows(s: Sample, choice: cov.Choice, cfg: AlgoConfig, seed: tuple[int, int], mean_logp: float, mean_advantage: float) -> Tensor:
    """score, group, index, position of each token of a sample -> [R, 4] float64."""
    values = cov.covariance(s.old_logp, _advantage(s), mean_logp, mean_advantage)
    score = choice.score(values, cov.draws(s.num_response, *seed, s.group, s.index), cfg).double()
    place = torch.tensor([s.group, s.index], dtype=torch.float64).expand(len(score), 2)
    return torch.cat([score[:, None], place, torch.arange(len(score), dtype=torch.float64)[:, None]], dim=1)


def _advantage(s: Sample) -> Tensor:
    """[R] float64."""
    given = s.advantage
    return given.double() if isinstance(given, Tensor) else torch.full((s.num_response,), float(given), dtype=torch.float64)
