"""A window: a rank's live parameters, open to the engine for reading while a load lasts.

On CUDA nothing is copied: the allocations in which the parameters lie are exported through CUDA IPC, once, and again only when a parameter
has moved. On CPU the rank copies its shards into shared memory at each load, so both offer the same thing: an address for each name.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from megaflow.parallel import cuda_ipc
from megaflow.parallel.shared_memory import map_words, open_fd

_ALIGN = 256  # bytes, in the CPU's copy: as CUDA's allocator does


class Window:
    """The rank's side. `parameters`: global name -> this rank's live shard, contiguous, all of them on one device.

    epoch        changes whenever an opened window no longer shows the parameters; 0: never shown
    """

    def __init__(self, parameters: dict[str, Tensor]):
        self.parameters = parameters
        for name, p in parameters.items():
            assert p.is_contiguous(), f"{name} has strides {p.stride()} for {tuple(p.shape)}"
        self.on_cuda = next(iter(self.parameters.values())).is_cuda
        self.epoch = 0
        self.addresses: list[int] = []  # of the parameters, as of the last refresh
        if self.on_cuda:
            cuda_ipc.refuse_expandable_segments()
        else:
            self._reserve()

    def _reserve(self) -> None:
        self._places: dict[str, int] = {}
        used = 0
        for name, p in self.parameters.items():
            self._places[name] = used
            used += -(-p.nbytes // _ALIGN) * _ALIGN
        self._fd = os.memfd_create("megaflow-window")
        self._copy = map_words(self._fd, used)[1].view(torch.uint8)

    def refresh(self, may_have_moved: bool = False) -> bool:
        """Show the present values. True: `descriptor` has changed and opened windows must be opened anew.

        may_have_moved: memory was given back since the last time; what has the old addresses again may still be another allocation.
        """
        addresses = [p.data_ptr() for p in self.parameters.values()]
        if self.on_cuda:
            moved = may_have_moved or addresses != self.addresses
            torch.cuda.synchronize()  # whatever writes the weights, on whichever stream, has done so
        else:
            moved = self.epoch == 0
            for name, p in self.parameters.items():
                start = self._places[name]
                self._copy[start : start + p.nbytes].view(p.dtype).view(p.shape).copy_(p.detach())
        self.addresses = addresses
        self.epoch += moved
        return moved

    def descriptor(self) -> dict[str, Any]:
        """What OpenWindow needs (JSON): segments, and for each name its segment and the offset in it."""
        if not self.on_cuda:
            segments = [{"fd": self._fd, "nbytes": self._copy.numel()}]
            return {"pid": os.getpid(), "segments": segments, "places": {n: (0, start) for n, start in self._places.items()}}
        bases: dict[int, int] = {}
        places = {}
        for name, p in self.parameters.items():
            base, nbytes = cuda_ipc.segment_of(p.data_ptr())
            assert p.data_ptr() + p.nbytes <= base + nbytes, f"{name} reaches over the end of its allocation"
            places[name] = (bases.setdefault(base, len(bases)), p.data_ptr() - base)
        segments = [{"handle": self._export(base), "address": base} for base in bases]
        return {"pid": os.getpid(), "segments": segments, "places": places}

    def _export(self, base: int) -> str:
        try:
            return cuda_ipc.export_segment(base)
        except RuntimeError as e:
            raise RuntimeError(
                f"the actor's parameters cannot be shared with the engine ({e}): they do not lie in plain cudaMalloc memory. "
                "Is there an allocator setting or plug-in? sync.transport=buckets does without"
            ) from e


class OpenWindow:
    """Another process's window (or this one's own), as addresses in this process."""

    def __init__(self, descriptor: dict[str, Any]):
        self._places = descriptor["places"]
        self._keep: list[Any] = []
        self._close: list[Callable[[], None]] = []
        self._bases = [self._open(descriptor["pid"], segment) for segment in descriptor["segments"]]

    def _open(self, pid: int, segment: dict[str, Any]) -> int:
        if "fd" in segment:
            fd = open_fd(pid, segment["fd"])
            words = map_words(fd, segment["nbytes"])[1]
            os.close(fd)  # the mapping stays
            self._keep.append(words)
            return words.data_ptr()
        if pid == os.getpid():  # CUDA opens no handle in the process that made it
            return segment["address"]
        base = cuda_ipc.open_segment(segment["handle"])
        self._close.append(lambda: cuda_ipc.close_segment(base))
        return base

    @property
    def layout(self) -> tuple[list[int], dict[str, Any]]:
        """All that `address` depends on."""
        return self._bases, self._places

    def address(self, name: str) -> int:
        segment, offset = self._places[name]
        return self._bases[segment] + offset

    def close(self) -> None:
        """After the last read has ended. Addresses are void from here on."""
        for close in self._close:
            close()
        self._keep, self._close, self._bases = [], [], []  # new lists: `layout` may be kept for comparison
