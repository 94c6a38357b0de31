"""The policy as a Hugging Face folder."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

from megaflow.actor.actor import Actor
from megaflow.config.schema import Config
from megaflow.parallel.mesh import Mesh
from megaflow.types import Layout
from megaflow.weights import folder
from megaflow.weights.plan import make_plan
from megaflow.weights.reshard import Resharder


def full_tensors(actor: Actor, cfg: Config, mesh: Mesh) -> Iterator[tuple[str, Tensor]]:
    """Collective over tp x pp. Every tensor of the model under its Hugging Face name; valid until the next one is asked for."""
    dtype = getattr(torch, cfg.model.dtype)
    plan = make_plan(actor.shape, mesh.tp.size, mesh.pp.size, Layout(), dtype, cfg.sync.bucket_mb << 20)
    resharder = Resharder(plan, actor.shape, actor.parameters, mesh)
    buffer = torch.empty(plan.capacity, dtype=torch.uint8, device=actor.device)
    for bucket in resharder.stream(lambda nbytes: buffer):
        yield from bucket.tensors()


def export_hf(actor: Actor, cfg: Config, mesh: Mesh, target: Path) -> None:
    """Collective. Write the present weights; rank 0 writes, the others hand over their parts."""
    tensors = full_tensors(actor, cfg, mesh)
    error = None
    try:
        if mesh.rank == 0:
            folder.export(tensors, cfg.model.path, target, getattr(torch, cfg.model.dtype), actor.shape.tied)
        else:
            for _ in tensors:
                pass
    except Exception as e:
        error = e
    mesh.all_ok(error)
