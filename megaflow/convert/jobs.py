"""The files of a conversion, planned from names and sizes alone: the same on every rank, and the same when it is started again."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from megaflow.convert.layout import Axes, Group, groups
from megaflow.convert.sharded import FORMAT, INDEX
from megaflow.convert.sources import Source
from megaflow.convert.tensorfile import Spec
from megaflow.types import PreflightError
from megaflow.weights.plan import shard_shape
from megaflow.weights.table import Row, table

Cut = Callable[[Row, Sequence[Tensor]], list[Sequence[Tensor]]]  # Hugging Face tensors of a row -> what each file of a job gets


@dataclass(frozen=True)
class Job:
    """Files that are written side by side, so that each tensor is read once; all hold tensors of the same names and sizes."""

    files: tuple[str, ...]
    rows: tuple[Row, ...]
    specs: tuple[Spec, ...]  # of each file
    cut: Cut

    @property
    def nbytes(self) -> int:
        return len(self.files) * sum(spec.nbytes for spec in self.specs)


@dataclass(frozen=True)
class Target:
    """says    what it is, to tell a conversion from another (JSON)
    index   {file: its size and checksum} -> name and content of the index file; None: there is none
    """

    says: dict[str, Any]
    jobs: tuple[Job, ...]
    index: Callable[[dict[str, Any]], tuple[str, dict[str, Any]] | None]


def to_hugging_face(source: Source, shard_bytes: int) -> Target:
    shape = source.shape
    batches = _batches([(row, source.specs(row)) for row in table(shape)], shard_bytes)
    count = len(batches)
    names = [f"model-{i + 1:05}-of-{count:05}.safetensors" for i in range(count)] if count > 1 else ["model.safetensors"]
    jobs = tuple(Job((name,), rows, specs, lambda _, tensors: [tensors]) for name, (rows, specs) in zip(names, batches, strict=True))

    def index(files: dict[str, Any]) -> tuple[str, dict[str, Any]] | None:
        if count == 1:
            return None
        size = sum(job.nbytes for job in jobs)
        return "model.safetensors.index.json", {"metadata": {"total_size": size}, "weight_map": _weight_map(jobs)}

    return Target({"to": "hf", "shard_bytes": shard_bytes}, jobs, index)


def to_megatron(source: Source, axes: Axes, shard_bytes: int) -> Target:
    """Raises ConfigError when the model cannot be cut so."""
    axes.check(source.shape, str(source.rest))
    jobs = tuple(job for group in groups(source.shape, axes) for job in _jobs_of(group, source, shard_bytes))

    def index(files: dict[str, Any]) -> tuple[str, dict[str, Any]] | None:
        ranks: dict[str, dict[str, str]] = {}
        for job in jobs:
            for file in job.files:
                ranks.setdefault(file.partition("-")[0], {}).update({spec.name: file for spec in job.specs})
        return INDEX, {"format": FORMAT, "layout": vars(axes), "files": files, "weight_map": ranks}

    return Target({"to": "megatron", "layout": vars(axes), "shard_bytes": shard_bytes}, jobs, index)


def _jobs_of(group: Group, source: Source, shard_bytes: int) -> list[Job]:
    shape, parts = source.shape, group.parts
    batches = _batches([(row, [_shard_spec(row, source, parts)]) for row in group.rows], shard_bytes)

    def cut(row: Row, tensors: Sequence[Tensor]) -> list[Sequence[Tensor]]:
        return [[row.kind.split(list(tensors), parts, part, shape)] for part in range(parts)]

    made = []
    for i, (rows, specs) in enumerate(batches):
        files = tuple(f"{stem}-{i + 1:05}-of-{len(batches):05}.safetensors" for stem in group.stems)
        made.append(Job(files, rows, specs, cut))
    return made


def _shard_spec(row: Row, source: Source, parts: int) -> Spec:
    found = source.specs(row)
    if len({spec.dtype for spec in found}) > 1:
        kinds = ", ".join(f"{spec.name} {spec.dtype}" for spec in found)
        raise PreflightError(f"{source.path}: tensors that Megatron holds as one are of several dtypes: {kinds}")
    return Spec(row.megatron, found[0].dtype, shard_shape(row, source.shape, parts))


def _batches(rows: list[tuple[Row, list[Spec]]], shard_bytes: int) -> list[tuple[tuple[Row, ...], tuple[Spec, ...]]]:
    """Rows in order, as many as a file of `shard_bytes` holds; a row that is larger by itself gets a file of its own."""
    batches: list[tuple[list[Row], list[Spec]]] = []
    used = 0
    for row, specs in rows:
        size = sum(spec.nbytes for spec in specs)
        if not batches or used + size > shard_bytes:
            batches.append(([], []))
            used = 0
        batches[-1][0].append(row)
        batches[-1][1].extend(specs)
        used += size
    return [(tuple(rows), tuple(specs)) for rows, specs in batches]


def _weight_map(jobs: Sequence[Job]) -> dict[str, str]:
    return {spec.name: job.files[0] for job in jobs for spec in job.specs}
