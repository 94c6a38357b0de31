"""Triton kernels over tables of memory regions (regions.py), and how a list of regions is cut into their work.

Addresses, not tensors, are in the tables: sources may lie in memory that another process or another GPU owns. Work is sorted into classes
by the widest word that addresses and strides allow (16 bytes: two 8-byte words a load); within a class, runs (one stretch) and blocks
(strided rows) have a kernel each. A model whose sizes are multiples of 8 has one class, so a copy is one or two launches.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from megaflow.parallel.digest import K
from megaflow.parallel.regions import Regions, interleaved

_BLOCK = 4096  # words a program: 32 KiB of 8-byte words, 128 bytes a thread in flight
_WARPS = 8
_DIGEST_K = tl.constexpr(K)
_WIDTHS = (16, 8, 4, 2, 1)


@triton.jit
def _copy_runs(table, WORD: tl.constexpr, ALIGN: tl.constexpr, BLOCK: tl.constexpr):
    """table [n, 3]: source, target, words."""
    row = table + tl.program_id(0) * 3
    source = tl.multiple_of(tl.load(row).to(tl.pointer_type(WORD)), ALIGN)
    target = tl.multiple_of(tl.load(row + 1).to(tl.pointer_type(WORD)), ALIGN)
    words = tl.load(row + 2).to(tl.int32)
    if ALIGN == 16:
        words = tl.multiple_of(words, 2)  # so that the mask does not break a 16-byte access in two
    i = tl.arange(0, BLOCK)
    tl.store(target + i, tl.load(source + i, mask=i < words), mask=i < words)


@triton.jit
def _copy_blocks(table, WORD: tl.constexpr, ALIGN: tl.constexpr, BLOCK: tl.constexpr):
    """table [n, 7]: source, target, words a row, both strides in words, first word of the region, end."""
    row = table + tl.program_id(0) * 7
    source = tl.load(row).to(tl.pointer_type(WORD))
    target = tl.load(row + 1).to(tl.pointer_type(WORD))
    width = tl.load(row + 2).to(tl.int32)  # 64-bit division would take longer than the memory
    i = tl.load(row + 5).to(tl.int32) + tl.arange(0, BLOCK)
    inside = i < tl.load(row + 6).to(tl.int32)
    line = i // width
    column = i - line * width
    value = tl.load(source + line.to(tl.int64) * tl.load(row + 3) + column, mask=inside)
    tl.store(target + line.to(tl.int64) * tl.load(row + 4) + column, value, mask=inside)


@triton.jit
def _weighted_sum(value, i, PER_WORD: tl.constexpr, BITS: tl.constexpr):
    """Part of the digest: `value` [BLOCK] int64 is the i-th of the region's units, PER_WORD of which make a 64-bit word."""
    if PER_WORD > 1:
        value = (value & ((1 << BITS) - 1)) << ((i % PER_WORD) * BITS)
        i = i // PER_WORD
    return tl.sum(value * (i * _DIGEST_K + 1), 0)


@triton.jit
def _digest_runs(table, out, WORD: tl.constexpr, ALIGN: tl.constexpr, PER_WORD: tl.constexpr, BITS: tl.constexpr, BLOCK: tl.constexpr):
    """table [n, 4]: address, words, index of the first word in its region, region. Adds to out [regions] int64."""
    row = table + tl.program_id(0) * 4
    source = tl.multiple_of(tl.load(row).to(tl.pointer_type(WORD)), ALIGN)
    words = tl.load(row + 1).to(tl.int32)
    if ALIGN == 16:
        words = tl.multiple_of(words, 2)
    i = tl.arange(0, BLOCK)
    value = tl.load(source + i, mask=i < words, other=0).to(tl.int64)
    total = _weighted_sum(value, tl.load(row + 2) + i, PER_WORD, BITS)
    tl.atomic_add(out + tl.load(row + 3), total, sem="relaxed")


@triton.jit
def _digest_blocks(table, out, WORD: tl.constexpr, ALIGN: tl.constexpr, PER_WORD: tl.constexpr, BITS: tl.constexpr, BLOCK: tl.constexpr):
    """table [n, 6]: address, words a row, stride in words, first word, end, region."""
    row = table + tl.program_id(0) * 6
    source = tl.load(row).to(tl.pointer_type(WORD))
    width = tl.load(row + 1).to(tl.int32)
    i = tl.load(row + 3).to(tl.int32) + tl.arange(0, BLOCK)
    inside = i < tl.load(row + 4).to(tl.int32)
    line = i // width
    value = tl.load(source + line.to(tl.int64) * tl.load(row + 2) + (i - line * width), mask=inside, other=0).to(tl.int64)
    total = _weighted_sum(value, i.to(tl.int64), PER_WORD, BITS)
    tl.atomic_add(out + tl.load(row + 5), total, sem="relaxed")


_WORDS = {16: tl.int64, 8: tl.int64, 4: tl.int32, 2: tl.int16, 1: tl.int8}


@dataclass(frozen=True)
class _Launch:
    """One kernel over `table` [n, columns] int64 on the device; `width`: bytes that are moved at once."""

    kernel: object
    table: Tensor
    width: int

    @property
    def word(self) -> int:
        return min(self.width, 8)


class CopyWork:
    """Launches that copy region by region."""

    def __init__(self, sources: Regions, targets: Regions, is_remote: np.ndarray, device: torch.device):
        is_run = (sources.rows == 1) | ((sources.stride == sources.row_bytes) & (targets.stride == targets.row_bytes))
        row_bytes = np.where(is_run, sources.rows * sources.row_bytes, sources.row_bytes)
        strides = np.where(is_run, 0, sources.stride | targets.stride)
        width = _width(sources.address | targets.address | row_bytes | strides)
        self.launches: list[_Launch] = []
        for w, run, region, begin, length in _classes(width, is_run, row_bytes, sources.rows):
            word, order = min(w, 8), interleaved(is_remote[region])
            p, first, words = region[order], begin[order], length[order]
            source, target = sources.address[p], targets.address[p]
            if run:
                columns = [source + first * word, target + first * word, words]
            else:
                sizes = [row_bytes[p] // word, sources.stride[p] // word, targets.stride[p] // word]
                columns = [source, target, *sizes, first, first + words]
            kernel = _copy_runs if run else _copy_blocks
            self.launches.append(_Launch(kernel, _table(columns, device), w))

    def launch(self) -> None:
        for work in self.launches:
            work.kernel[(len(work.table),)](work.table, _WORDS[work.width], work.width, _BLOCK, num_warps=_WARPS)


class DigestWork:
    """Launches that add up digests region by region."""

    def __init__(self, regions: Regions, device: torch.device):
        self.out = torch.zeros(len(regions), dtype=torch.int64, device=device)
        is_run = (regions.rows == 1) | (regions.stride == regions.row_bytes)
        row_bytes = np.where(is_run, regions.rows * regions.row_bytes, regions.row_bytes)
        width = _width(regions.address | row_bytes | np.where(is_run, 0, regions.stride))
        self.launches: list[_Launch] = []
        for w, run, p, first, words in _classes(width, is_run, row_bytes, regions.rows):
            word = min(w, 8)
            if run:
                columns = [regions.address[p] + first * word, words, first, p]
            else:
                columns = [regions.address[p], row_bytes[p] // word, regions.stride[p] // word, first, first + words, p]
            self.launches.append(_Launch(_digest_runs if run else _digest_blocks, _table(columns, device), w))

    def launch(self) -> Tensor:
        self.out.zero_()
        for work in self.launches:
            shape = (_WORDS[work.width], work.width, 8 // work.word, 8 * work.word, _BLOCK)
            work.kernel[(len(work.table),)](work.table, self.out, *shape, num_warps=_WARPS)
        return self.out


def _width(bits: np.ndarray) -> np.ndarray:
    """The largest of 16, 8, 4, 2, 1 that divides every number whose bits were joined."""
    return np.minimum(bits & -bits, 16)


def _classes(width: np.ndarray, is_run: np.ndarray, row_bytes: np.ndarray, rows: np.ndarray) -> Iterator[tuple]:
    """For each class that has any: (bytes moved at once, whether they are runs, and of each chunk its region, first word and words).

    All arguments [number of regions]; row_bytes of a run: all of its bytes.
    """
    nbytes = row_bytes * np.where(is_run, 1, rows)
    for w in _WIDTHS:
        for run in (True, False):
            mine = np.flatnonzero((width == w) & (is_run == run))
            if len(mine):
                piece, first, words = _chunks(nbytes[mine] // min(w, 8))
                yield w, run, mine[piece], first, words


def _chunks(words: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Cut pieces of so many words into chunks of a block: (piece, first word, words) of each chunk."""
    assert (words < 1 << 31).all(), "a region of 2^31 words and more: its kernel counts in 32 bits"
    count = -(-words // _BLOCK)
    piece = np.repeat(np.arange(len(words)), count)
    first = (np.arange(len(piece)) - np.repeat(np.cumsum(count) - count, count)) * _BLOCK
    return piece, first, np.minimum(words[piece] - first, _BLOCK)


def _table(columns: list[np.ndarray], device: torch.device) -> Tensor:
    return torch.from_numpy(np.stack(columns, 1).astype(np.int64)).to(device)
