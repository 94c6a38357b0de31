"""Hugging Face folders: read only the slices that a rank needs; what lies in one beside the weights."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megaflow.monitor.progress import mark
from megaflow.shape import ModelShape
from megaflow.types import PreflightError
from megaflow.weights.table import Row, table

INDEX = "model.safetensors.index.json"


class Folder:
    """The tensors of a Hugging Face folder by name, read lazily."""

    def __init__(self, path: str | Path):
        self.path = Path(path)
        self.files = self._index()
        self._opened: dict[Path, Any] = {}  # a model with experts has tens of thousands of tensors: open each file once

    def _index(self) -> dict[str, Path]:
        index = self.path / INDEX
        if os.path.lexists(index):
            names = _weight_map(index)
            missing = sorted({f for f in names.values() if not (self.path / f).is_file()})
            if missing:
                raise PreflightError(f"{index} names files that are not there: {', '.join(missing)}")
            return {name: self.path / f for name, f in names.items()}
        files = sorted(self.path.glob("*.safetensors"))
        if not files:
            raise PreflightError(f"{self.path}: no *.safetensors; convert the model with transformers' save_pretrained")
        out: dict[str, Path] = {}
        for f in files:
            with _opened(f) as opened:
                for name in opened.keys():  # noqa: SIM118 - the library's object is no mapping
                    if name in out:
                        why = f"and there is no {INDEX} that says which one counts; remove one of the two"
                        raise PreflightError(f"{self.path}: {name} is in {out[name].name} and in {f.name}, {why}")
                    out[name] = f
        return out

    def read(self, name: str) -> Tensor:
        if name not in self.files:
            raise PreflightError(f"{self.path}: no tensor {name}; the weights do not fit config.json")
        path = self.files[name]
        if path not in self._opened:
            self._opened[path] = _opened(path)
        return self._opened[path].get_tensor(name)


def _weight_map(index: Path) -> dict[str, str]:
    """Tensor name -> file name."""
    try:
        names = json.loads(index.read_text())["weight_map"]
    except OSError as e:
        raise unreadable(index, e) from e
    except (ValueError, KeyError, TypeError) as e:
        raise PreflightError(f"{index} is damaged: {type(e).__name__}: {e}; copy it again") from e
    if not isinstance(names, dict) or not names or not all(isinstance(f, str) for f in names.values()):
        raise PreflightError(f"{index} is damaged: its weight_map gives no file for each tensor; copy it again")
    return names


def _opened(path: Path) -> Any:
    from safetensors import SafetensorError, safe_open

    try:
        path.open("rb").close()  # the library says of any file that it cannot open that there is none
        return safe_open(path, "pt")
    except OSError as e:
        raise unreadable(path, e) from e
    except SafetensorError as e:
        raise PreflightError(f"{path}: not a whole safetensors file ({e}); copy it again") from e


def unreadable(path: Path, error: OSError) -> PreflightError:
    """A file that the system does not give."""
    if path.is_symlink() and isinstance(error, FileNotFoundError):
        return PreflightError(f"{path} is a link to {os.readlink(path)}, which is not there")
    return PreflightError(f"{path} cannot be read: {error.strerror or error}")


def load(
    folder: str | Path, shape: ModelShape, parameters: dict[str, Tensor], tp: int, tp_rank: int, etp: int = 1, etp_rank: int = 0
) -> None:
    """Fill a rank's Megatron shards, by global name, from a Hugging Face folder. Experts are cut by etp, everything else by tp.

    Raises PreflightError when a tensor is missing or of another size than config.json says.
    """
    source = Folder(folder)

    def shard(row: Row, parts: int, part: int) -> Tensor:
        try:
            return row.kind.split([source.read(h) for h in row.hf], parts, part, shape)
        except RuntimeError as e:
            raise PreflightError(f"{folder}: {', '.join(row.hf)} cannot be split into {parts} parts: {e}") from e

    fill(folder, shape, parameters, (tp, tp_rank), (etp, etp_rank), shard)


@torch.no_grad()
def fill(
    folder: str | Path, shape: ModelShape, parameters: dict[str, Tensor], tp: tuple[int, int], etp: tuple[int, int],
    shard: Callable[[Row, int, int], Tensor],
) -> None:  # fmt: skip
    """Each parameter, by global name, from `shard(row, parts, part)`. tp, etp: how many parts there are, and which is this rank's."""
    rows = {r.megatron: r for r in table(shape)}
    if shape.tied:  # with several stages the last one has its own copy of the embedding
        rows["output_layer.weight"] = rows["embedding.word_embeddings.weight"]
    for number, (name, parameter) in enumerate(parameters.items()):
        mark("tensor of the model folder", number + 1, len(parameters))
        row = rows[name]
        found = shard(row, *(tp if row.expert < 0 else etp))
        if found.shape != parameter.shape:
            sizes = f"give{'s' * (len(row.hf) == 1)} a shard of {list(found.shape)}, config.json asks for {list(parameter.shape)}"
            raise PreflightError(f"{folder}: {', '.join(row.hf)} {sizes}")
        parameter.copy_(found)


def copy_rest(source: str | Path, target: Path) -> None:
    """What a Hugging Face folder has beside weights: configuration and tokenizer, also those that come as code."""
    for f in Path(source).iterdir():
        if f.is_file() and f.suffix in (".json", ".txt", ".model", ".jinja", ".py", ".tiktoken") and not f.name.endswith(".index.json"):
            shutil.copy(f, target / f.name)


def say_dtype(folder: Path, dtype: torch.dtype, tied: bool) -> None:
    """In its config.json."""
    config = json.loads((folder / "config.json").read_text())
    config.update(dtype=str(dtype).removeprefix("torch."), tie_word_embeddings=tied)
    config.pop("torch_dtype", None)
    (folder / "config.json").write_text(json.dumps(config, indent=2))
