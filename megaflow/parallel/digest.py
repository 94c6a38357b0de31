"""A fingerprint of a tensor's bits, cheap enough to compute at every sync on both sides.

The bytes are read as 64-bit words w_i; the digest is sum_i w_i * (i K + 1) modulo 2^64, K even. The weights are odd, so any single
changed word changes the sum; they differ, so moved words do too; and a sum needs no order of evaluation, so a CPU and a GPU agree.
"""

from __future__ import annotations

import torch
from torch import Tensor

K = 0x1E3779B97F4A7C16  # even; from the golden ratio's bits, so that neighbouring weights share no pattern
_CHUNK = 1 << 22  # words at a time: bounds the temporary to 32 MiB


def digest(t: Tensor) -> Tensor:
    """0-dim int64 on t's device. Any dtype and shape; contiguous memory is not copied."""
    data = t.detach().contiguous().view(-1).view(torch.uint8)
    if data.storage_offset() % 8 or data.numel() % 8:
        padded = data.new_zeros((data.numel() + 7) // 8 * 8)
        padded[: data.numel()] = data
        data = padded
    words = data.view(torch.int64)
    total = torch.zeros((), dtype=torch.int64, device=t.device)
    for start in range(0, words.numel(), _CHUNK):
        part = words[start : start + _CHUNK]
        weights = torch.arange(start, start + part.numel(), device=t.device).mul_(K).add_(1)
        total += weights.mul_(part).sum()
    return total
