"""The digest against the same sum in Python's integers."""

from __future__ import annotations

import pytest
import torch

from megaflow.parallel import digest as module
from megaflow.parallel.digest import digest


def by_hand(t: torch.Tensor) -> int:
    data = t.contiguous().view(-1).view(torch.uint8).numpy().tobytes()
    data += b"\0" * (-len(data) % 8)
    words = [int.from_bytes(data[i : i + 8], "little") for i in range(0, len(data), 8)]
    total = sum(w * (i * 0x1E3779B97F4A7C16 + 1) for i, w in enumerate(words)) % 2**64
    return total - 2**64 if total >= 2**63 else total


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.uint8])
@pytest.mark.parametrize("size", [1, 7, 8, 1001])
def test_value(dtype, size, monkeypatch):
    monkeypatch.setattr(module, "_CHUNK", 64)
    t = (torch.randn(size, generator=torch.Generator().manual_seed(size)) * 100).to(dtype)
    assert int(digest(t)) == by_hand(t)


def test_each_flipped_bit_and_each_swap_changes_it():
    t = torch.randn(64)
    before = int(digest(t))
    for i in range(64):
        for bit in (0, 13, 31):
            changed = t.clone()
            changed.view(torch.int32)[i] ^= 1 << bit if bit < 31 else -(2**31)
            assert int(digest(changed)) != before
    swapped = t.clone()
    swapped[[0, 2]] = swapped[[2, 0]]
    assert int(digest(swapped)) != before


def test_an_unaligned_view_gives_the_same():
    base = torch.arange(100, dtype=torch.float32)
    assert int(digest(base[1:51])) == int(digest(base[1:51].clone()))
