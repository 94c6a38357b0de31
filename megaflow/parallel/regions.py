"""Two-dimensional regions of memory: copy many of them in one launch, and fingerprint many of them in one launch.

A region is `rows` stretches of `row_bytes` bytes, `stride` bytes apart, from `address` on. On CUDA a list of regions becomes a table of
work, made once, over which one Triton kernel runs; on CPU torch does the same region by region and is the reference for the kernels.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from megaflow.parallel.digest import digest


@dataclass(frozen=True)
class Regions:
    """Each field is int64 [number of regions]; sizes in bytes."""

    address: np.ndarray
    stride: np.ndarray
    rows: np.ndarray
    row_bytes: np.ndarray

    @classmethod
    def of(cls, rows: list[tuple[int, int, int, int]]) -> Regions:
        """From (address, stride, rows, row_bytes) each."""
        table = np.array(rows, dtype=np.int64).reshape(-1, 4)
        return cls(*(np.ascontiguousarray(column) for column in table.T))

    def __len__(self) -> int:
        return len(self.address)

    @property
    def nbytes(self) -> int:
        return int((self.rows * self.row_bytes).sum())

    def view(self, i: int) -> Tensor:
        """Region i of host memory, [rows, row_bytes] uint8."""
        rows, row_bytes, stride = int(self.rows[i]), int(self.row_bytes[i]), int(self.stride[i])
        span = (rows - 1) * stride + row_bytes
        memory = (ctypes.c_uint8 * span).from_address(int(self.address[i]))
        return torch.frombuffer(memory, dtype=torch.uint8).as_strided((rows, row_bytes), (stride, 1))


class Copier:
    """Copies region i of `sources` to region i of `targets`: of the same rows and row_bytes, none overlapping another.

    is_remote [number of regions]: the source lies behind a link
    """

    def __init__(self, sources: Regions, targets: Regions, is_remote: np.ndarray, device: torch.device):
        assert (sources.rows == targets.rows).all() and (sources.row_bytes == targets.row_bytes).all()
        self.sources, self.targets = sources, targets
        self.work = None
        if device.type == "cuda":
            from megaflow.parallel.region_kernels import CopyWork

            self.work = CopyWork(sources, targets, is_remote, device)

    def launch(self) -> None:
        """On the current stream; does not wait."""
        if self.work is not None:
            return self.work.launch()
        for i in range(len(self.sources)):
            self.targets.view(i).copy_(self.sources.view(i))
        return None


class Digester:
    """Fingerprints of regions: the digest (digest.py) of the region's bytes, row after row."""

    def __init__(self, regions: Regions, device: torch.device):
        self.regions = regions
        self.work = None
        if device.type == "cuda":
            from megaflow.parallel.region_kernels import DigestWork

            self.work = DigestWork(regions, device)

    def launch(self) -> Tensor:
        """[number of regions] int64 on the regions' device; does not wait."""
        if self.work is not None:
            return self.work.launch()
        found = [digest(self.regions.view(i)) for i in range(len(self.regions))]
        return torch.stack(found) if found else torch.zeros(0, dtype=torch.int64)


def interleaved(is_remote: np.ndarray) -> np.ndarray:
    """An order of pieces of work in which those that cross a link are spread evenly among those that do not: both proceed at once."""
    position = np.empty(len(is_remote))
    for kind in (False, True):
        mine = np.flatnonzero(is_remote == kind)
        position[mine] = (np.arange(len(mine)) + 0.5) / max(len(mine), 1)
    return np.argsort(position, kind="stable")
