"""A training checkpoint, read without building the model."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from torch import Tensor

from megaflow.checkpoint.tensors import SavedTensors
from megaflow.convert.tensorfile import Spec
from megaflow.shape import read_shape
from megaflow.types import PreflightError
from megaflow.weights.kinds import Vocab
from megaflow.weights.plan import shard_shape
from megaflow.weights.table import Row


class Checkpoint:
    """A training checkpoint of megaflow, under whatever layout it was saved. `model`: the folder that the run started from."""

    kind = "training checkpoint"

    def __init__(self, path: Path, model: Path | None):
        self.path = path
        self._saved = SavedTensors(path)
        self._model = model
        if model is not None:
            self.rest, self.shape = model, read_shape(model)

    def specs(self, row: Row) -> list[Spec]:
        found = self._saved.find(row.megatron)
        if found is None:
            raise PreflightError(f"{self.path} has no {row.megatron}: it is of another model than {self.rest}")
        dtype, size = found
        wanted = shard_shape(row, self.shape, 1)
        if size[1:] != wanted[1:] or size[0] < row.sizes[0][0] or (size != wanted and not isinstance(row.kind, Vocab)):
            raise PreflightError(f"{self.path}: {row.megatron} is {list(size)}, {self.rest}/config.json asks for {list(wanted)}")
        return [Spec(name, dtype, size) for name, size in zip(row.hf, row.sizes, strict=True)]

    def read(self, row: Row) -> list[Tensor]:
        full = row.kind.join([self._saved.read(row.megatron)], self.shape)
        return [full[0][: self.shape.vocab_size]] if isinstance(row.kind, Vocab) else full

    def stored(self) -> Iterator[tuple[str, Spec]]:
        for name, entry in self._saved.saved.items():
            yield "", Spec(name, entry.properties.dtype, tuple(entry.size))

    def facts(self) -> dict[str, Any]:
        content = self._saved.manifest
        saved = " ".join(f"{name}={size}" for name, size in content.layout.items())
        versions = ", ".join(f"{name} {version}" for name, version in content.versions.items())
        return {"step": content.step, "saved with": saved, "versions": versions, "files": len(content.files)}

    def identity(self) -> Any:
        return [{name: entry.crc32 for name, entry in self._saved.manifest.files.items()}, str(self._model)]

    def damaged(self, rank: int = 0, world: int = 1) -> list[str]:
        return self._saved.damaged(rank, world)

    def left_out(self) -> list[str]:
        return []
