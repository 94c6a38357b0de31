"""A training checkpoint, read without building the model."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from torch import Tensor

from megaflow.checkpoint.tensors import SavedTensors
from megaflow.convert.layout import original
from megaflow.convert.tensorfile import Spec
from megaflow.shape import read_shape
from megaflow.types import PreflightError
from megaflow.weights.kinds import Vocab
from megaflow.weights.plan import shard_shape
from megaflow.weights.table import Row, table

LISTED = 10  # tensors


class Checkpoint:
    """A training checkpoint of megaflow, under whatever layout it was saved. `model`: the folder that the run started from.

    Raises PreflightError that says what differs when the checkpoint is of another model.
    """

    kind = "training checkpoint"
    has_checksums = True

    def __init__(self, path: Path, model: Path | None):
        self.path = path
        self._saved = SavedTensors(path)
        self._model = model
        if model is not None:
            self.rest, self.shape = model, read_shape(model)
            if different := [*self._differences(), *self._beyond_the_model()]:
                raise PreflightError("\n  ".join([f"{path} is of another model than {model}:", *different]))

    def _differences(self) -> Iterator[str]:
        """Sizes that the manifest notes (checkpoint/state.py: model_facts) and config.json has otherwise."""
        shape, saved = self.shape, self._saved.manifest
        present = {
            "num_layers": shape.num_layers,
            "hidden_size": shape.hidden_size,
            "ffn_hidden_size": shape.ffn_size,
            "num_attention_heads": shape.num_heads,
            "num_query_groups": shape.num_kv_heads,
            "kv_channels": shape.head_dim,
            "vocab_size": shape.padded_vocab(saved.layout.get("tp", 1)),
            "tied_embeddings": shape.tied,
            "qkv_bias": shape.qkv_bias,
            "qk_norm": shape.qk_norm or shape.latent is not None,
            "experts": shape.experts.count if shape.experts else 0,
        }
        for name, value in present.items():
            if name in saved.model and saved.model[name] != value:
                yield f"{name}: {saved.model[name]} in the checkpoint, {value} by config.json"

    def _beyond_the_model(self) -> Iterator[str]:
        if left := self._saved.unread(row.megatron for row in table(self.shape)):
            more = f" and {len(left) - LISTED} more" if len(left) > LISTED else ""
            yield f"{len(left)} tensors of the checkpoint are no part of that model: {', '.join(left[:LISTED])}{more}"

    def specs(self, row: Row) -> list[Spec]:
        found = self._saved.find(original(row.megatron, self.shape))
        if found is None:
            raise PreflightError(f"{self.path} has no {row.megatron}: it is of another model than {self.rest}")
        dtype, size = found
        wanted = shard_shape(row, self.shape, 1)
        if size[1:] != wanted[1:] or size[0] < row.sizes[0][0] or (size != wanted and not isinstance(row.kind, Vocab)):
            raise PreflightError(f"{self.path}: {row.megatron} is {list(size)}, {self.rest}/config.json asks for {list(wanted)}")
        return [Spec(name, dtype, size) for name, size in zip(row.hf, row.sizes, strict=True)]

    def read(self, row: Row) -> list[Tensor]:
        full = row.kind.join([self._saved.read(original(row.megatron, self.shape))], self.shape)
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
        return []  # with tensors beyond the model it is not opened
