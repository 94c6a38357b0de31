"""The plan of a run before it starts: reads the folders' config.json, asks the sync's own planner for its bytes, touches no device."""

from __future__ import annotations

from megaflow.algo import ADVANTAGES
from megaflow.config.footprint import weight_bytes
from megaflow.config.schema import Config
from megaflow.plan.hardware import Device
from megaflow.plan.models import Lengths, Models
from megaflow.plan.planned import Planned, Traffic
from megaflow.shape import ModelShape

MOST_ROWS = 3_000  # layers times experts times engine workers that the exact planner is asked about: two seconds


def plan_run(
    config: Config, world_size: int, device: Device, mfu: float, ranks_per_host: int = 8, lengths: Lengths | None = None
) -> Planned:
    """Of a configuration that `checks.check` has passed. Raises PreflightError for a model that cannot be read."""
    models = Models.of(config, ADVANTAGES)
    traffic = sync_traffic(config, models.policy, world_size, ranks_per_host)
    return Planned(config, models, world_size, device, traffic, mfu, lengths, ranks_per_host)


def sync_traffic(config: Config, shape: ModelShape, world_size: int, ranks_per_host: int) -> Traffic:
    """What the busiest worker of the first engine reads. Nothing crosses a link where each rank has its own worker's slices (known
    without torch); else the planner of weights/pull.py counts, or, for very many parameters, even shares are taken."""
    p, tp = config.parallel, config.rollout.tp
    worker = float(weight_bytes(config, shape))
    if p.pp == 1 and p.ep == 1 and p.tp == 1 == p.etp:
        return Traffic(worker, 0.0, 0.0, "pull" if config.sync.transport != "buckets" else "buckets")
    hosts = -(-world_size // ranks_per_host)
    experts = shape.experts.count if shape.experts else 1
    if config.sync.transport != "buckets" and shape.num_layers * experts * tp <= MOST_ROWS:
        found = _exact(config, shape, world_size, ranks_per_host)
        if found is not None:
            return found
    share = worker * (1 - 1 / (p.pp * (max(1, p.tp // tp) if shape.experts is None else p.ep)))
    far = share if p.tp * p.pp * p.cp > ranks_per_host and hosts > 1 else 0.0
    return Traffic(worker, share - far, far, "buckets, estimated" if far or config.sync.transport == "buckets" else "pull, estimated")


def _exact(config: Config, shape: ModelShape, world_size: int, ranks_per_host: int) -> Traffic | None:
    """None: some worker's slices lie on another host, so weights go in buckets."""
    import torch

    from megaflow.types import Layout
    from megaflow.weights.pull import Source, can_pull, make_reading

    p, tp = config.parallel, config.rollout.tp
    places = tuple(place(config, rank, world_size, ranks_per_host) for rank in range(world_size))
    source = Source(places, p.tp, p.pp, p.vpp, p.ep, p.etp)
    if not can_pull(shape, source):
        return None
    fused = config.rollout.backend == "sglang"
    dtype = getattr(torch, config.model.dtype)
    readings = [make_reading(shape, source, Layout(tp, rank, fused, config.rollout.ep), rank, dtype) for rank in range(tp)]
    busiest = max(readings, key=lambda reading: reading.link_bytes)
    return Traffic(float(busiest.nbytes), float(busiest.link_bytes), 0.0, "pull")


def place(config: Config, rank: int, world_size: int, ranks_per_host: int):
    """A rank's weights.pull.Place: tp varies fastest, then cp, dp, and pp slowest; for experts etp, then ep, within a stage."""
    from megaflow.weights.pull import Place

    p = config.parallel
    stage, within = divmod(rank, world_size // p.pp)
    return Place(
        rank, f"host {rank // ranks_per_host}", within % p.tp, stage, within // (p.tp * p.cp), within // p.etp % p.ep, within % p.etp
    )
