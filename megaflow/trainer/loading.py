"""A model's weights from disk into a rank's shards: from a Hugging Face folder, or from one that tools/convert.py has cut."""

from __future__ import annotations

from pathlib import Path

from torch import Tensor

from megaflow.convert.sharded import Sharded
from megaflow.parallel.mesh import Mesh
from megaflow.plan.safetensors import is_converted
from megaflow.shape import ModelShape
from megaflow.types import PreflightError
from megaflow.weights import folder


def load_weights(path: str, shape: ModelShape, parameters: dict[str, Tensor], mesh: Mesh) -> None:
    """Collective. Fill a rank's parameters, by global name.

    The checksums that a converted folder has are compared first, each rank's part of the files.
    Raises PreflightError when a file is missing or damaged, or the weights are not of the model's sizes.
    """
    if not is_converted(path):
        folder.load(path, shape, parameters, mesh.tp.size, mesh.tp.index, mesh.etp.size, mesh.etp.index)
        return
    with mesh.together():
        source = Sharded(Path(path))
        if found := source.damaged(mesh.rank, mesh.world_size):
            raise PreflightError("\n".join(found))
    load_converted(source, shape, parameters, (mesh.tp.size, mesh.tp.index), (mesh.etp.size, mesh.etp.index))


def load_converted(source: Sharded, shape: ModelShape, parameters: dict[str, Tensor], tp: tuple[int, int], etp: tuple[int, int]) -> None:
    """tp, etp: how many parts there are, and which is this rank's. Experts are cut by etp, everything else by tp."""
    folder.fill(source.path, shape, parameters, tp, etp, source.shard)
