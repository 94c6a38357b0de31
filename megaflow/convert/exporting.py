"""A model in memory, as a Hugging Face folder: tensor by tensor into files of a limited size, so that one tensor is held at a time."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from megaflow.convert.jobs import to_hugging_face
from megaflow.convert.tensorfile import Spec, Writer
from megaflow.shape import ModelShape
from megaflow.weights.folder import copy_rest, say_dtype
from megaflow.weights.table import Row

SHARD_BYTES = 5_000_000_000  # of a file at most; a tensor that is larger has a file of its own


@dataclass(frozen=True)
class Live:
    """What `to_hugging_face` plans files from: names, sizes and dtypes of a model in memory."""

    shape: ModelShape
    dtype: torch.dtype

    def specs(self, row: Row) -> list[Spec]:
        dtype = torch.float32 if row.fp32 else self.dtype
        return [Spec(name, dtype, size) for name, size in zip(row.hf, row.sizes, strict=True)]


def export(tensors: Iterator[tuple[str, Tensor]], live: Live, source: str | Path, target: Path, shard_bytes: int = SHARD_BYTES) -> Path:
    """Write a Hugging Face folder: weights from `tensors`, the rest (config, tokenizer) from `source`. Atomic: the name means complete.

    tensors: in the order of the name table. One file is model.safetensors; several are model-00001-of-0000N.safetensors with an index.
    """
    part = target.with_name(target.name + ".part")
    shutil.rmtree(part, ignore_errors=True)
    part.mkdir(parents=True)
    plan = to_hugging_face(live, shard_bytes)
    for job in plan.jobs:
        (name,) = job.files
        writer = Writer(part / name, job.specs)
        for spec in job.specs:
            found, tensor = next(tensors)
            assert found == spec.name, f"{found} came where {spec.name} is due"
            writer.add(tensor.cpu())
        writer.close()
    copy_rest(source, part)
    say_dtype(part, live.dtype, live.shape.tied)
    if (index := plan.index({})) is not None:
        (part / index[0]).write_text(json.dumps(index[1], indent=1))
    if target.exists():
        shutil.rmtree(target)
    os.replace(part, target)
    return target
