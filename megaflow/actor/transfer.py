"""Between host and device with one copy for many tensors, and without waiting: each small copy of its own costs a launch and a wait."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

ALIGNMENT = 16  # bytes; a view in another dtype must start at a multiple of its size


def to_device(tensors: Sequence[Tensor], device: torch.device) -> list[Tensor]:
    """Host tensors on the device, in one copy from pinned memory that nobody waits for. On CPU: the tensors themselves."""
    if device.type != "cuda":
        return list(tensors)
    host, places = joined(tensors, pin_memory=True)
    return parted(host.to(device, non_blocking=True), tensors, places)


def joined(tensors: Sequence[Tensor], pin_memory: bool = False) -> tuple[Tensor, list[int]]:
    """(all bytes one after another, uint8; where each tensor begins)."""
    places, end = [], 0
    for t in tensors:
        places.append(end)
        end += -(-t.nbytes // ALIGNMENT) * ALIGNMENT
    host = torch.empty(end, dtype=torch.uint8, pin_memory=pin_memory)
    for t, place in zip(tensors, places, strict=True):
        host[place : place + t.nbytes].view(t.dtype).copy_(t.reshape(-1))
    return host, places


def parted(whole: Tensor, like: Sequence[Tensor], places: Sequence[int]) -> list[Tensor]:
    """Views of `whole` in the shapes and dtypes of `like`."""
    return [whole[place : place + t.nbytes].view(t.dtype).view(t.shape) for t, place in zip(like, places, strict=True)]


def to_host(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Tensors of one dtype in host memory, in one copy; waits once."""
    if not tensors or not tensors[0].is_cuda:
        return list(tensors)
    whole = torch.cat([t.reshape(-1) for t in tensors]).cpu()
    return [part.view(t.shape) for part, t in zip(whole.split([t.numel() for t in tensors]), tensors, strict=True)]
