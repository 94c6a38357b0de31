"""A folder of files cut for a Megatron layout, as `hf-to-megatron` writes it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from torch import Tensor

from megaflow.checkpoint.manifest import FileEntry, measure
from megaflow.convert.layout import TIED_COPY, Axes, Group, groups, original
from megaflow.convert.tensorfile import Opened, Spec, TensorFile, same_bits
from megaflow.monitor.progress import mark
from megaflow.plan.safetensors import CONVERTED_INDEX as INDEX
from megaflow.shape import read_shape
from megaflow.types import PreflightError
from megaflow.weights.folder import unreadable
from megaflow.weights.kinds import Vocab
from megaflow.weights.plan import shard_shape
from megaflow.weights.table import Row

FORMAT = 1


class Sharded:
    """Copies of one tensor, in the files of several ranks, must be equal."""

    kind = "converted folder"
    has_checksums = True

    def __init__(self, path: Path):
        self.path = self.rest = path
        self.shape = read_shape(path)
        self._index = _read_index(path / INDEX)
        self.axes = Axes(**self._index["layout"])
        self._opened = Opened()
        self._group_of: dict[str, Group] = {row.megatron: group for group in groups(self.shape, self.axes) for row in group.rows}
        if left := sorted({name for names in self._index["weight_map"].values() for name in names} - self._group_of.keys()):
            raise PreflightError(f"{path}: {len(left)} tensors there are no part of the model of its config.json, e.g. {left[0]}")

    def specs(self, row: Row) -> list[Spec]:
        name = original(row.megatron, self.shape)
        parts = self._group_of[name].parts
        spec = self._file(name, 0).specs[name]
        if spec.shape != (wanted := shard_shape(row, self.shape, parts)):
            raise PreflightError(f"{self.path}: {row.megatron} is {list(spec.shape)}, config.json asks for {list(wanted)}")
        return [Spec(name, spec.dtype, size) for name, size in zip(row.hf, row.sizes, strict=True)]

    def _file(self, name: str, part: int) -> TensorFile:
        stem = self._group_of[name].stems[part]
        file = self._index["weight_map"].get(stem, {}).get(name)
        if file is None or name not in self._opened[self.path / file].specs:
            raise PreflightError(f"{self.path}: the files {stem}-* have no tensor {name}")
        return self._opened[self.path / file]

    def read(self, row: Row) -> list[Tensor]:
        if isinstance(row.kind, Vocab):
            return [self._stacked(original(row.megatron, self.shape))]
        shards = [self._shard(row.megatron, part) for part in range(self._group_of[row.megatron].parts)]
        if row.kind.dim is None and not all(same_bits(shards[0], other) for other in shards[1:]):
            raise self._unequal(row.megatron)
        return row.kind.join(shards, self.shape)

    def _stacked(self, name: str) -> Tensor:
        """[V, H] Shard after shard into its place: an embedding may be larger than two layers. A tied copy is compared on the way."""
        full: Tensor | None = None
        for part in range(self._group_of[name].parts):
            shard = self._shard(name, part)
            if self.shape.tied and TIED_COPY in self._group_of and not same_bits(shard, self._shard(TIED_COPY, part)):
                raise self._unequal(name)
            if full is None:
                full = shard.new_empty(self.shape.vocab_size, shard.shape[1])
            rows = full[part * len(shard) : (part + 1) * len(shard)]  # fewer where padding begins
            rows.copy_(shard[: len(rows)])
        assert full is not None
        return full

    def shard(self, row: Row, parts: int, part: int) -> Tensor:
        """Part `part` of `parts` of a parameter: read as it lies there where it is cut so, else cut anew from all its parts."""
        self.specs(row)
        if self._group_of[row.megatron].parts == parts:
            return self._shard(row.megatron, part)
        return row.kind.split(self.read(row), parts, part, self.shape)

    def check_complete(self) -> None:
        """Every rank's files have its tensors. Reads no values. Raises PreflightError that names what is missing or of another size."""
        for group in groups(self.shape, self.axes):
            for row in group.rows:
                wanted = shard_shape(row, self.shape, group.parts)
                for part in range(group.parts):
                    if (found := self._file(row.megatron, part).specs[row.megatron].shape) != wanted:
                        said = f"{row.megatron} of {group.stems[part]} is {list(found)}, config.json asks for {list(wanted)}"
                        raise PreflightError(f"{self.path}: {said}")

    def _shard(self, name: str, part: int) -> Tensor:
        return self._file(name, part).read(name)

    def _unequal(self, name: str) -> PreflightError:
        return PreflightError(f"{self.path}: the copies of {name} in the files of different ranks differ; convert the model again")

    def stored(self) -> Iterator[tuple[str, Spec]]:
        for file in self._index["files"]:
            yield from ((file, spec) for spec in self._opened[self.path / file].specs.values())

    def facts(self) -> dict[str, Any]:
        return {"layout": str(self.axes), "files": len(self._index["files"])}

    def identity(self) -> Any:
        return self._index["files"]

    def damaged(self, rank: int = 0, world: int = 1) -> list[str]:
        files, found = self._index["files"], []
        for name in sorted(files)[rank::world]:
            mark(f"checksum of {name}")  # of a large model they take longer than a start may stand still
            try:
                actual = measure(self.path / name)
            except OSError as e:
                found.append(str(unreadable(self.path / name, e)))
                continue
            if actual != FileEntry(**files[name]):
                found.append(f"{self.path / name} is damaged: its checksum differs from the one written with it")
        return found

    def left_out(self) -> list[str]:
        return []  # with tensors beyond the model it is not opened


def _read_index(path: Path) -> dict[str, Any]:
    """Raises PreflightError when it, or a file that it names, is not as it was written (sizes only)."""
    try:
        index = json.loads(path.read_text())
        version, files = index["format"], {path.with_name(name): FileEntry(**entry) for name, entry in index["files"].items()}
        if not all(type(size) is int and size > 0 for size in vars(Axes(**index["layout"])).values()):
            raise ValueError(f"layout {index['layout']}")
        for name, file in ((name, file) for names in index["weight_map"].values() for name, file in names.items()):
            if file not in index["files"]:
                raise ValueError(f"weight_map says that {name} is in {file}, which is none of its files")
    except OSError as e:
        raise unreadable(path, e) from e
    except (ValueError, KeyError, TypeError, AttributeError) as e:
        raise PreflightError(f"{path} is damaged: {type(e).__name__}: {e}; convert the model again") from e
    if version != FORMAT:
        raise PreflightError(f"{path} is of format {version}; this version of megaflow reads format {FORMAT}")
    for file, written in files.items():
        if not file.is_file():
            raise PreflightError(f"{file} is missing")
        if (size := file.stat().st_size) != written.bytes:
            raise PreflightError(f"{file} is damaged: {size:,} bytes, written were {written.bytes:,}")
    return index
