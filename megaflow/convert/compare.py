"""What a model on disk consists of, and whether two are the same."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from megaflow.convert.sources import Source
from megaflow.convert.tensorfile import NAMES, Spec, same_bits
from megaflow.shape import ModelShape
from megaflow.types import PreflightError
from megaflow.weights.table import Row, table


def describe(source: Source, is_checked: bool) -> Iterator[str]:
    """Lines: each tensor as it lies on disk, then what there is in all. is_checked: every file with a checksum is read.

    Raises PreflightError that names the files which are not as they were written.
    """
    stored = list(source.stored())
    for file, spec in stored:
        yield f"{NAMES[spec.dtype]:<8} {_size(spec):<20} {spec.name}" + (f"   {file}" if file else "")
    shape = getattr(source, "shape", None)  # a checkpoint may be looked at without its model
    facts = {"": f"{source.path}: {source.kind}", **source.facts(), "tensors": f"{len(stored):,}"}
    if shape is not None:
        facts |= {"family": f"{shape.family}, {shape.num_layers} layers", "parameters": f"{shape.num_parameters:,}"}
        if left_out := source.left_out():
            facts["not of the model"] = f"{len(left_out)} tensors, e.g. {left_out[0]}"
    facts["bytes of weights"] = f"{sum(spec.nbytes for _, spec in stored):,}"
    facts["checksums"] = _checksums(source, is_checked)
    yield from (f"{name}: {value}" if name else str(value) for name, value in facts.items())


def _checksums(source: Source, is_checked: bool) -> str:
    if not source.has_checksums:
        return f"a {source.kind} has none"
    if not is_checked:
        return "not read: damage is not seen (--checksums reads every file)"
    if damaged := source.damaged():
        raise PreflightError("\n".join(damaged))
    return "every file is as it was written"


def _size(spec: Spec) -> str:
    return "x".join(map(str, spec.shape)) or "scalar"


def size_of(source: Source) -> int:
    """Bytes of the model."""
    return sum(spec.nbytes for row in table(source.shape) for spec in source.specs(row))


@dataclass
class Comparison:
    """num_tensors that were compared; a sentence for each that differs, and for each setting of config.json that a model depends on."""

    num_tensors: int
    nbytes: int
    different: list[str]
    settings: list[str]


def compare(a: Source, b: Source, progress: Callable[[int], None]) -> Comparison:
    """Every tensor, bit for bit, one at a time. Raises PreflightError when they are models of other sizes, or a file is damaged."""
    if damaged := [*a.damaged(), *b.damaged()]:
        raise PreflightError("\n".join(damaged))
    theirs = {row.hf: row for row in table(b.shape)}
    rows = table(a.shape)
    if theirs.keys() != (ours := {row.hf for row in rows}):
        only = sorted(name for names in ours ^ theirs.keys() for name in names)
        raise PreflightError(f"{a.path} and {b.path} are different models: {len(only)} tensors are in one only, e.g. {only[0]}")
    found = Comparison(0, 0, [], different_settings(a.shape, b.shape))
    for row in rows:
        for one, other in zip(_named(a, row), _named(b, theirs[row.hf]), strict=True):
            found.num_tensors += 1
            found.nbytes += one[1].nbytes
            if not same_bits(one[1], other[1]):
                found.different.append(f"{one[0]}: {_difference(one[1], other[1])}")
            progress(one[1].nbytes)
    return found


SAID_TWICE = {"rope_theta", "type"}  # of rope_scaling: a field of its own; rope_type by its older name


def different_settings(a: ModelShape, b: ModelShape) -> list[str]:
    ours, theirs = _settings(a), _settings(b)
    return [f"{k}: {ours.get(k)} and {theirs.get(k)}" for k in dict.fromkeys([*ours, *theirs]) if ours.get(k) != theirs.get(k)]


def _settings(shape: ModelShape) -> dict[str, Any]:
    """Flat, whichever of the two ways config.json says a rotary embedding in."""
    flat: dict[str, Any] = {}
    for name, value in vars(shape).items():
        if name == "rope_scaling":
            value = {key: each for key, each in value.items() if key not in SAID_TWICE}
        elif dataclasses.is_dataclass(value):
            value = vars(value)
        flat |= {f"{name}.{key}": each for key, each in value.items()} if isinstance(value, dict) else {name: value}
    return flat


def _named(source: Source, row: Row) -> list[tuple[str, Tensor]]:
    source.specs(row)  # raises with names and sizes when they do not fit
    return list(zip(row.hf, source.read(row), strict=True))


def _difference(a: Tensor, b: Tensor) -> str:
    if (a.dtype, a.shape) != (b.dtype, b.shape):
        return f"{a.dtype} {list(a.shape)} and {b.dtype} {list(b.shape)}"
    gap = (a.double() - b.double()).abs()
    return f"{int((a != b).sum()):,} of {a.numel():,} values differ, by {float(gap.max()):.3g} at most"
