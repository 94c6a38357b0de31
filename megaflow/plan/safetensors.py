"""The headers of a model folder's safetensors files: complete or not, without reading a single weight or importing torch.

A file is 8 bytes (little-endian length of the header), the header (JSON: name -> dtype, shape, data_offsets), then the data.
Format: https://huggingface.co/docs/safetensors
"""

from __future__ import annotations

import json
from collections.abc import Set
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megaflow.types import PreflightError

INDEX = "model.safetensors.index.json"
CONVERTED_INDEX = "megatron.index.json"  # of a folder that tools/convert.py has cut for a Megatron layout
MOST_HEADER_BYTES = 100_000_000  # the format's own limit


@dataclass(frozen=True)
class WeightFiles:
    shapes: dict[str, tuple[int, ...]]
    num_files: int
    num_bytes: int

    @property
    def tensors(self) -> Set[str]:
        """Their names."""
        return self.shapes.keys()


def is_converted(folder: str | Path) -> bool:
    """Whether its weights are cut for a Megatron layout; convert/sharded.py reads them."""
    return (Path(folder) / CONVERTED_INDEX).is_file()


def read_weight_files(folder: Path) -> WeightFiles:
    """Raises PreflightError for no files, a file that the index names and that is missing, a truncated or broken one."""
    index = folder / INDEX
    listed = _read_index(index) if index.is_file() else {}
    files = sorted({folder / name for name in listed.values()}) or sorted(folder.glob("*.safetensors"))
    if not files:
        raise PreflightError(f"{folder}: no *.safetensors; convert the model (transformers: save_pretrained)")
    missing = [file.name for file in files if not file.is_file()]
    if missing:
        raise PreflightError(f"{index} names files that are not there: {', '.join(missing)}; download the model again")
    headers = {file: read_header(file) for file in files}
    for name, file_name in listed.items():
        if name not in headers[folder / file_name]:
            raise PreflightError(f"{index} says that {name} is in {file_name}, which does not have it; download the model again")
    if not listed:
        _refuse_twice(folder, headers)
    shapes = {name: tuple(tensor.get("shape", ())) for header in headers.values() for name, tensor in header.items()}
    return WeightFiles(shapes, len(files), sum(file.stat().st_size for file in files))


def _refuse_twice(folder: Path, headers: dict[Path, dict[str, Any]]) -> None:
    """Without an index nothing says which of two tensors of one name counts."""
    place: dict[str, Path] = {}
    for file, header in headers.items():
        for name in header:
            if name in place:
                raise PreflightError(f"{folder}: {name} is in {place[name].name} and in {file.name}, and there is no {INDEX}; remove one")
            place[name] = file


def read_header(file: Path) -> dict[str, Any]:
    """Tensor name -> {dtype, shape, data_offsets}. Raises PreflightError if the file's size is not what its header says."""
    size = file.stat().st_size
    with file.open("rb") as stream:
        length = int.from_bytes(stream.read(8), "little")
        text = stream.read(length) if length <= min(size, MOST_HEADER_BYTES) else b""
    try:
        header = json.loads(text)
        header.pop("__metadata__", None)
        end = 8 + length + max((tensor["data_offsets"][1] for tensor in header.values()), default=0)
    except (ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
        raise PreflightError(f"{file}: not a safetensors file: its header cannot be read; download the model again") from error
    if size != end:
        state = "truncated" if size < end else "longer than it should be"
        raise PreflightError(f"{file} is {state}: {size} bytes, its header says {end}; download the model again")
    return header


def _read_index(index: Path) -> dict[str, str]:
    try:
        return dict(json.loads(index.read_text())["weight_map"])
    except (ValueError, KeyError, TypeError) as error:
        raise PreflightError(f"{index}: cannot be read: {type(error).__name__}: {error}") from error
