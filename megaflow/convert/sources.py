"""What can be converted and compared: three forms of a model, each read as the Hugging Face tensors of one row of the name table."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Protocol

import yaml
from torch import Tensor

from megaflow.convert.sharded import INDEX, Sharded
from megaflow.convert.tensorfile import Opened, Spec
from megaflow.shape import ModelShape, read_shape
from megaflow.types import ConfigError, PreflightError
from megaflow.weights.folder import Folder
from megaflow.weights.table import Row, table


class Source(Protocol):
    """kind   one word for a person
    path   as given, or the checkpoint found there
    rest   the Hugging Face folder with config.json and tokenizer
    has_checksums   of its files
    """

    kind: str
    has_checksums: bool
    path: Path
    rest: Path
    shape: ModelShape

    def specs(self, row: Row) -> list[Spec]:
        """The Hugging Face tensors of a row, without values. Raises PreflightError when one is missing or not of the model's size."""

    def read(self, row: Row) -> list[Tensor]:
        """The same with values, in the host's memory."""

    def stored(self) -> Iterator[tuple[str, Spec]]:
        """(file, tensor) as they lie on disk."""

    def facts(self) -> dict[str, Any]:
        """What a person wants to know beside tensors."""

    def identity(self) -> Any:
        """JSON that is another when the content is."""

    def damaged(self, rank: int = 0, world: int = 1) -> list[str]:
        """Reads every `world`-th file from `rank` on, where checksums are kept. Sentences that name the files."""

    def left_out(self) -> list[str]:
        """Tensors there that are no part of the model."""


class HuggingFace:
    kind = "Hugging Face folder"
    has_checksums = False

    def __init__(self, path: Path):
        self.path = self.rest = path
        self.shape = read_shape(path)
        self._folder = Folder(path)
        self._opened = Opened()

    def specs(self, row: Row) -> list[Spec]:
        return [self._checked(name, size) for name, size in zip(row.hf, row.sizes, strict=True)]

    def _checked(self, name: str, size: tuple[int, ...]) -> Spec:
        if name not in self._folder.files:
            raise PreflightError(f"{self.path}: no tensor {name}; the weights do not fit config.json")
        file = self._folder.files[name]
        spec = self._opened[file].specs.get(name)
        if spec is None:
            raise PreflightError(f"{file} has no tensor {name}, which the index of {self.path} says is there")
        if spec.shape != size:
            raise PreflightError(f"{file}: {name} is {list(spec.shape)}, config.json asks for {list(size)}")
        return spec

    def read(self, row: Row) -> list[Tensor]:
        return [self._opened[self._folder.files[name]].read(name) for name in row.hf]

    def stored(self) -> Iterator[tuple[str, Spec]]:
        for file in dict.fromkeys(self._folder.files.values()):
            yield from ((file.name, spec) for spec in self._opened[file].specs.values())

    def facts(self) -> dict[str, Any]:
        return {"files": len(set(self._folder.files.values()))}

    def identity(self) -> Any:
        files = sorted({*self._folder.files.values(), self.path / "config.json"})
        return [[f.name, f.stat().st_size, f.stat().st_mtime_ns] for f in files]

    def damaged(self, rank: int = 0, world: int = 1) -> list[str]:
        return []

    def left_out(self) -> list[str]:
        known = {name for row in table(self.shape) for name in row.hf}
        return [name for name in self._folder.files if name not in known]


def open_source(path: Path, model: Path | None = None, needs_model: bool = True) -> Source:
    """What lies at `path`: a run's directory and its checkpoints/ mean the newest checkpoint there.

    model   for a checkpoint, the Hugging Face folder that the run started from; default: what the run's config.yaml says
    Raises PreflightError when it is nothing of the three, ConfigError when a checkpoint's model is not known.
    """
    if not path.is_dir():
        raise PreflightError(f"{path}: no such folder")
    if (path / INDEX).is_file():
        return Sharded(path)
    if (path / "config.json").is_file():
        return HuggingFace(path)
    from megaflow.checkpoint.directory import find  # these import Megatron, which takes seconds
    from megaflow.convert.saved import Checkpoint

    if (path / "manifest.json").is_file():
        checkpoint = path  # what it lacks, if anything, is said by name
    elif found := find(path) or find(path / "checkpoints"):
        checkpoint = found[1]
    else:
        raise PreflightError(f"{path} is no Hugging Face folder (config.json), no converted folder ({INDEX}) and has no whole checkpoint")
    try:
        return Checkpoint(checkpoint, model or _model_of_run(checkpoint, needs_model))
    except PreflightError:  # the folder that the run started from may have changed since: that is no reason not to look
        if needs_model or model is not None:
            raise
        return Checkpoint(checkpoint, None)


def _model_of_run(checkpoint: Path, is_needed: bool) -> Path | None:
    file = checkpoint.parent.parent / "config.yaml"
    why = f"there is no {file} that says it"
    if file.is_file():
        try:
            path = Path(yaml.safe_load(file.read_text())["model"]["path"])
        except (OSError, ValueError, KeyError, TypeError, yaml.YAMLError) as e:
            why = f"{file} does not say it ({type(e).__name__}: {e})"
        else:
            if (path / "config.json").is_file():
                return path
            why = f"{file} says model.path={path}, where there is no config.json"
    if is_needed:
        raise ConfigError(f"{checkpoint}: which model is it? {why}; give model=<the Hugging Face folder that the run started from>")
    return None
