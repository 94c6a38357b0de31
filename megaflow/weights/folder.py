"""Hugging Face folders: read only the slices that a rank needs, and write a folder that transformers and SGLang load."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megaflow.monitor.progress import mark
from megaflow.shape import ModelShape
from megaflow.types import PreflightError
from megaflow.weights.table import table


class Folder:
    """The tensors of a Hugging Face folder by name, read lazily."""

    def __init__(self, path: str | Path):
        self.path = Path(path)
        self.files = self._index()
        self._opened: dict[Path, Any] = {}  # a model with experts has tens of thousands of tensors: open each file once

    def _index(self) -> dict[str, Path]:
        from safetensors import SafetensorError, safe_open

        index = self.path / "model.safetensors.index.json"
        if index.is_file():
            names = json.loads(index.read_text())["weight_map"]
            missing = sorted({f for f in names.values() if not (self.path / f).is_file()})
            if missing:
                raise PreflightError(f"{index} names files that are not there: {', '.join(missing)}")
            return {name: self.path / f for name, f in names.items()}
        files = sorted(self.path.glob("*.safetensors"))
        if not files:
            raise PreflightError(f"{self.path}: no *.safetensors; convert the model with transformers' save_pretrained")
        out = {}
        for f in files:
            try:
                with safe_open(f, "pt") as opened:
                    out.update(dict.fromkeys(opened.keys(), f))
            except SafetensorError as e:
                raise PreflightError(f"{f}: not a whole safetensors file ({e}); copy it again") from e
        return out

    def read(self, name: str) -> Tensor:
        from safetensors import safe_open

        if name not in self.files:
            raise PreflightError(f"{self.path}: no tensor {name}; the weights do not fit config.json")
        path = self.files[name]
        if path not in self._opened:
            self._opened[path] = safe_open(path, "pt")
        return self._opened[path].get_tensor(name)


@torch.no_grad()
def load(
    folder: str | Path, shape: ModelShape, parameters: dict[str, Tensor], tp: int, tp_rank: int, etp: int = 1, etp_rank: int = 0
) -> None:
    """Fill a rank's Megatron shards, by global name, from a Hugging Face folder. Experts are cut by etp, everything else by tp.

    Raises PreflightError when a tensor is missing or of another size than config.json says.
    """
    source, rows = Folder(folder), {r.megatron: r for r in table(shape)}
    if shape.tied:  # with several stages the last one has its own copy of the embedding
        rows["output_layer.weight"] = rows["embedding.word_embeddings.weight"]
    for number, (name, parameter) in enumerate(parameters.items()):
        mark("tensor of the model folder", number + 1, len(parameters))
        row = rows[name]
        parts, part = (tp, tp_rank) if row.expert < 0 else (etp, etp_rank)
        try:
            shard = row.kind.split([source.read(h) for h in row.hf], parts, part, shape)
        except RuntimeError as e:
            raise PreflightError(f"{folder}: {', '.join(row.hf)} cannot be split into {parts} parts: {e}") from e
        if shard.shape != parameter.shape:
            sizes = f"give a shard of {list(shard.shape)}, config.json asks for {list(parameter.shape)}"
            raise PreflightError(f"{folder}: {', '.join(row.hf)} {sizes}")
        parameter.copy_(shard)


def export(tensors: Iterator[tuple[str, Tensor]], source: str | Path, target: str | Path, dtype: torch.dtype, tied: bool) -> Path:
    """Write a Hugging Face folder: weights from `tensors`, the rest (config, tokenizer) from `source`. Atomic: the name means complete.

    dtype: of the model; tensors keep theirs, since some stay fp32 in a 16-bit model.
    """
    from safetensors.torch import save_file

    target = Path(target)
    part = target.with_name(target.name + ".part")
    shutil.rmtree(part, ignore_errors=True)
    part.mkdir(parents=True)
    weights = {name: t.detach().to("cpu").contiguous().clone() for name, t in tensors}
    save_file(weights, part / "model.safetensors", metadata={"format": "pt"})
    copy_rest(source, part)
    (part / "model.safetensors").chmod(0o644)  # safetensors writes it for its owner alone
    say_dtype(part, dtype, tied)
    if target.exists():
        shutil.rmtree(target)
    os.replace(part, target)
    return target


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
