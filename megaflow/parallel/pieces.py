"""What an engine worker has to read: pieces of other processes' parameters, and where they go. Plain data that travels as JSON."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import NamedTuple

ZEROS = -1  # in place of a source rank: the piece is padding


class Piece(NamedTuple):
    """`rows` stretches of `row_bytes` bytes; offsets and strides in bytes, from the first byte of the parameter and of the target."""

    source: int  # rank
    stage: int  # its pipeline stage
    parameter: str  # Megatron's global name
    target: int  # index into Reading.targets
    offset: int
    stride: int
    target_offset: int
    target_stride: int
    rows: int
    row_bytes: int

    @property
    def nbytes(self) -> int:
        return self.rows * self.row_bytes

    @property
    def region(self) -> tuple[str, int, int, int, int]:
        """What is read, whoever reads it."""
        return self.parameter, self.offset, self.stride, self.rows, self.row_bytes


class Target(NamedTuple):
    """A parameter of the engine worker."""

    name: str
    shape: tuple[int, ...]
    dtype: str  # torch's name without "torch."


@dataclass(frozen=True)
class Reading:
    """All that the engine worker beside rank `reader` reads. Its pieces cover every byte of its targets exactly once."""

    reader: int
    targets: list[Target]
    pieces: list[Piece]

    @property
    def nbytes(self) -> int:
        """Of the targets, padding included."""
        return sum(p.nbytes for p in self.pieces)

    @property
    def link_bytes(self) -> int:
        """Read from other ranks, so over a link."""
        return sum(p.nbytes for p in self.pieces if p.source not in (self.reader, ZEROS))

    @property
    def sources(self) -> list[int]:
        """Ranks that something is read from."""
        return sorted({p.source for p in self.pieces} - {ZEROS})

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Reading:
        raw = json.loads(text)
        targets = [Target(name, tuple(shape), dtype) for name, shape, dtype in raw["targets"]]
        return cls(raw["reader"], targets, [Piece(*p) for p in raw["pieces"]])
