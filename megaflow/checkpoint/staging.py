"""Host memory in which the state of a checkpoint waits while it is written and training goes on."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from megaflow.parallel import device

BLOCK_BYTES = 1 << 28
ALIGNMENT = 64  # bytes


class HostMemory:
    """Blocks that tensors are laid out in one after another.

    Allocated by the first save and used again by the next, whose tensors have the same sizes: fresh memory costs more than the copy.
    """

    def __init__(self, is_pinned: bool = False) -> None:
        """is_pinned: copies from a GPU run at the link's full speed; such memory must live as long as the process."""
        self.is_pinned = is_pinned
        self.blocks: list[Tensor] = []
        self.reset()

    def reset(self) -> None:
        """What lies here may be overwritten from now on."""
        self._block, self._end = 0, 0

    @property
    def nbytes(self) -> int:
        return sum(block.nbytes for block in self.blocks)

    def owns(self, tensor: Tensor) -> bool:
        """Whether the tensor lies here, so that nobody but a save writes to it."""
        return not tensor.is_cuda and any(0 <= tensor.data_ptr() - block.data_ptr() < block.nbytes for block in self.blocks)

    def take(self, like: Tensor) -> Tensor:
        """An uninitialised tensor of that shape and dtype, contiguous."""
        size = like.numel() * like.element_size()
        while self._block < len(self.blocks) and self._end + size > self.blocks[self._block].nbytes:
            self._block, self._end = self._block + 1, 0
        if self._block == len(self.blocks):
            self.blocks.append(_block(max(size, BLOCK_BYTES), self.is_pinned))
        found = self.blocks[self._block][self._end : self._end + size]
        self._end += -(-size // ALIGNMENT) * ALIGNMENT
        return found.view(like.dtype).view(like.shape)

    def copy(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Copies that are complete when this returns."""
        copies = [self.take(t).copy_(t.detach(), non_blocking=True) for t in tensors]
        device.synchronize()
        return copies


def _block(size: int, is_pinned: bool) -> Tensor:
    block = torch.from_numpy(np.empty(size, np.uint8))  # torch.empty would fill it in deterministic mode
    if is_pinned:
        # by registering it: torch's allocator of pinned memory would round each block up to a power of two
        error = torch.cuda.cudart().cudaHostRegister(block.data_ptr(), size, 0)
        if int(error) != 0:
            raise RuntimeError(f"{size:,} bytes of host memory could not be pinned ({error}): raise ulimit -l, or set run.async_save=false")
    return block


def exact(tensor: Tensor) -> Tensor:
    """The same contiguous host memory under a storage that ends where the tensor does: torch.save writes storages whole."""
    flat = tensor.contiguous().view(-1).view(torch.uint8)
    return torch.from_numpy(flat.numpy()).view(tensor.dtype).view(tensor.shape)
