"""Safetensors files read and written one tensor at a time. The library maps whole files and wants a file's tensors all at once.

A file is the length of its header (8 bytes, little endian), the header (JSON: name -> dtype, shape, place), and the tensors' bytes.
"""

from __future__ import annotations

import json
import os
import struct
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from megaflow.checkpoint.manifest import FileEntry
from megaflow.types import PreflightError
from megaflow.weights.folder import unreadable

DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "I64": torch.int64,
    "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8, "BOOL": torch.bool,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2,
}  # fmt: skip
NAMES = {dtype: name for name, dtype in DTYPES.items()}
LONGEST_HEADER = 100_000_000  # bytes; the library's own limit


@dataclass(frozen=True)
class Spec:
    """A tensor without its values."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return torch.Size(self.shape).numel() * self.dtype.itemsize


class TensorFile:
    """The tensors of a file; only what `read` returns is in memory. Raises PreflightError that names the file when it is damaged."""

    def __init__(self, path: Path):
        self.path = path
        self.specs: dict[str, Spec] = {}
        self._places: dict[str, int] = {}
        try:
            self._read_header()
        except FileNotFoundError as e:
            raise unreadable(path, e) if path.is_symlink() else PreflightError(f"{path} is missing") from e
        except OSError as e:
            raise unreadable(path, e) from e
        except (ValueError, KeyError, TypeError, AttributeError, struct.error) as e:
            raise PreflightError(f"{path}: not a whole safetensors file ({e}); copy it again") from e

    def _read_header(self) -> None:
        with self.path.open("rb") as f:
            (length,) = struct.unpack("<Q", f.read(8))
            if length > LONGEST_HEADER:
                raise ValueError(f"a header of {length:,} bytes")
            header = json.loads(f.read(length))
        end = 8 + length
        for name, entry in header.items():
            if name == "__metadata__":
                continue
            if entry["dtype"] not in DTYPES:
                raise PreflightError(f"{self.path}: {name} is of dtype {entry['dtype']}, which is not known: {', '.join(DTYPES)} are")
            spec = Spec(name, DTYPES[entry["dtype"]], tuple(entry["shape"]))
            first, last = entry["data_offsets"]
            if last - first != spec.nbytes:
                raise ValueError(f"{name} has {last - first:,} bytes, its shape asks for {spec.nbytes:,}")
            self.specs[name], self._places[name] = spec, 8 + length + first
            end = max(end, 8 + length + last)
        if self.path.stat().st_size != end:
            raise ValueError(f"{self.path.stat().st_size:,} bytes, its header asks for {end:,}")

    def read(self, name: str) -> Tensor:
        spec = self.specs[name]
        if not spec.nbytes:
            return torch.empty(spec.shape, dtype=spec.dtype)
        data = bytearray(spec.nbytes)
        try:
            self._read_into(memoryview(data), name)
        except OSError as e:
            raise unreadable(self.path, e) from e
        return torch.frombuffer(data, dtype=spec.dtype).view(spec.shape)

    def _read_into(self, view: memoryview, name: str) -> None:
        with self.path.open("rb", buffering=0) as f:
            f.seek(self._places[name])
            done = 0
            while done < len(view):  # the system reads at most 2 GiB at once
                count = f.readinto(view[done:])
                if not count:
                    raise PreflightError(f"{self.path}: ends within {name}; copy it again")
                done += count


class Writer:
    """Writes a file whose tensors come in the order of `specs`. What is written is on the disk when `close` returns."""

    def __init__(self, path: Path, specs: Sequence[Spec]):
        header, place = {"__metadata__": {"format": "pt"}}, 0
        for spec in specs:
            header[spec.name] = {"dtype": NAMES[spec.dtype], "shape": list(spec.shape), "data_offsets": [place, place + spec.nbytes]}
            place += spec.nbytes
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        self._specs = iter(specs)
        self._file = path.open("wb", buffering=0)
        self._size = self._crc = 0
        self._write(struct.pack("<Q", len(text)) + text)

    def add(self, tensor: Tensor) -> None:
        spec = next(self._specs)
        assert (tensor.dtype, tuple(tensor.shape)) == (spec.dtype, spec.shape), f"{tensor.dtype} {tuple(tensor.shape)} for {spec}"
        if spec.nbytes:
            self._write(memoryview(tensor.detach().contiguous().view(-1).view(torch.uint8).numpy()))

    def _write(self, data: bytes | memoryview) -> None:
        self._crc, view = zlib.crc32(data, self._crc), memoryview(data)
        self._size += len(view)
        while len(view):
            view = view[self._file.write(view) :]

    def close(self) -> FileEntry:
        os.fsync(self._file.fileno())
        self._file.close()
        return FileEntry(self._size, f"{self._crc:08x}")


class Opened(dict):
    """Path -> TensorFile: headers are read once."""

    def __missing__(self, path: Path) -> TensorFile:
        self[path] = TensorFile(path)
        return self[path]


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Equal as bytes: a NaN equals itself, and -0 is not 0."""
    if (a.dtype, a.shape) != (b.dtype, b.shape):
        return False
    return torch.equal(*(t.contiguous().view(-1).view(torch.uint8) for t in (a, b)))
