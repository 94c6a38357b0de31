"""The policy as a Hugging Face folder."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

from megaflow.actor.actor import Actor
from megaflow.config.schema import Config
from megaflow.convert.exporting import Live, export
from megaflow.parallel.mesh import Mesh
from megaflow.weights import gather


def full_tensors(actor: Actor, cfg: Config, mesh: Mesh) -> Iterator[tuple[str, Tensor]]:
    """Collective. Every tensor of the model under its Hugging Face name, on every rank."""
    dtype = getattr(torch, cfg.model.dtype)
    return gather.full_tensors(actor.shape, actor.parameters, mesh, dtype, cfg.parallel.vpp)


def export_hf(actor: Actor, cfg: Config, mesh: Mesh, target: Path) -> None:
    """Collective. Write the present weights; rank 0 writes each tensor as it comes, the others hand over their parts."""
    tensors = full_tensors(actor, cfg, mesh)
    with mesh.together():
        try:
            if mesh.rank == 0:
                export(tensors, Live(actor.shape, getattr(torch, cfg.model.dtype)), cfg.model.path, target)
        finally:
            for _ in tensors:  # on rank 0 too where it cannot write: the others wait for it in each tensor's collectives
                pass
