"""Copies and digests of memory regions: torch's against bytes cut in Python, and Triton's (in its interpreter) against torch's."""

from __future__ import annotations

import itertools
import json
import subprocess
import sys

import numpy as np
import pytest
import torch

from megaflow.parallel.regions import Copier, Digester, Regions, interleaved
from tests.ranks import ROOT, clean_env
from tests.unit.test_parallel_digest import by_hand

# offset, stride, rows, row_bytes: every width of word, runs and blocks, more than a kernel's block of words, one single byte
SOURCE = [
    (0, 40000, 1, 40000), (40016, 96, 7, 64), (41000, 40, 5, 24), (42004, 12, 9, 4),
    (43002, 6, 3, 2), (44001, 1, 1, 1), (45000, 16, 700, 16),
]  # fmt: skip
TARGET = [
    (64, 40000, 1, 40000), (40112, 64, 7, 64), (41008, 48, 5, 24), (42000, 8, 9, 4),
    (43010, 14, 3, 2), (44007, 1, 1, 1), (45008, 24, 700, 16),
]  # fmt: skip
SIZE = 65536


def regions(memory: torch.Tensor, cuts: list[tuple[int, int, int, int]]) -> Regions:
    return Regions.of([(memory.data_ptr() + offset, *rest) for offset, *rest in cuts])


def memories(device: str = "cpu") -> tuple[torch.Tensor, torch.Tensor]:
    source = torch.randint(0, 256, (SIZE,), dtype=torch.uint8, generator=torch.Generator().manual_seed(0)).to(device)
    return source, torch.full((SIZE,), 7, dtype=torch.uint8, device=device)


def copied_by_hand(source: bytes, target: bytes) -> bytes:
    out = bytearray(target)
    for (s, s_stride, rows, width), (t, t_stride, _, _) in zip(SOURCE, TARGET, strict=True):
        for r in range(rows):
            out[t + r * t_stride : t + r * t_stride + width] = source[s + r * s_stride : s + r * s_stride + width]
    return bytes(out)


def region_by_hand(memory: bytes, cut: tuple[int, int, int, int]) -> torch.Tensor:
    start, stride, rows, width = cut
    joined = b"".join(memory[start + r * stride : start + r * stride + width] for r in range(rows))
    return torch.frombuffer(bytearray(joined), dtype=torch.uint8)


def check(copier: Copier, digesters: tuple[Digester, Digester], source: torch.Tensor, target: torch.Tensor) -> None:
    before = bytes(target.cpu().numpy())
    copier.launch()
    data = bytes(source.cpu().numpy())
    assert bytes(target.cpu().numpy()) == copied_by_hand(data, before), "what was to be copied, and not a byte more"
    expected = [by_hand(region_by_hand(data, cut)) for cut in SOURCE]
    for digester in digesters:
        for _ in range(2):  # a second launch starts from zero again
            assert digester.launch().tolist() == expected


def test_torch_copies_and_digests_what_python_does():
    source, target = memories()
    cpu, s, t = torch.device("cpu"), regions(source, SOURCE), regions(target, TARGET)
    check(Copier(s, t, np.zeros(len(s), bool), cpu), (Digester(s, cpu), Digester(t, cpu)), source, target)
    assert s.nbytes == sum(rows * width for _, _, rows, width in SOURCE)


KERNELS = """
import json, numpy as np, torch
from megaflow.parallel.region_kernels import CopyWork, DigestWork
from tests.unit.test_parallel_regions import SOURCE, TARGET, check, memories, regions
source, target = memories()
cpu, s, t = torch.device("cpu"), regions(source, SOURCE), regions(target, TARGET)
copier, digesters = CopyWork(s, t, np.arange(len(s)) % 2 == 0, cpu), (DigestWork(s, cpu), DigestWork(t, cpu))
check(copier, digesters, source, target)
print(json.dumps(sorted({w.width for w in copier.launches})))
"""


def test_the_kernels_do_the_same():
    """In Triton's interpreter, which must be chosen before Triton is imported."""
    env = {**clean_env(), "TRITON_INTERPRET": "1"}
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", KERNELS], cwd=ROOT, env=env, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-4000:]
    assert json.loads(done.stdout) == [1, 2, 4, 8, 16], "every width of word was at work"


@pytest.mark.parametrize("name", ["_copy_runs", "_copy_blocks", "_digest_runs", "_digest_blocks"])
def test_the_kernels_compile_for_a_gpu_and_runs_move_16_bytes_at_a_time(name):
    """For Hopper, with Triton's own assembler: no GPU is needed for that."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource, compile

    from megaflow.parallel import region_kernels

    kernel = getattr(region_kernels, name)
    constants = {"WORD": region_kernels._WORDS[16], "ALIGN": 16, "PER_WORD": 1, "BITS": 64, "BLOCK": region_kernels._BLOCK}
    constants = {n: constants[n] for n in kernel.arg_names if n in constants}
    signature = {n: "constexpr" if n in constants else "*i64" for n in kernel.arg_names}
    indexed = {(kernel.arg_names.index(n),): value for n, value in constants.items()}
    source = ASTSource(kernel, signature, indexed, {(0,): [["tt.divisibility", 16]]})
    ptx = compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 8}).asm["ptx"]
    if name.endswith("runs"):
        assert "ld.global.v2.b64" in ptx
    if name == "_copy_runs":
        assert "st.global.v2.b64" in ptx


@pytest.mark.parametrize("remote", [[True] * 3 + [False] * 9, [False] * 4, [True, False]])
def test_pieces_that_cross_a_link_are_spread_evenly(remote):
    order = interleaved(np.array(remote))
    assert sorted(order.tolist()) == list(range(len(remote)))
    places = [i for i, piece in enumerate(order.tolist()) if remote[piece]]
    assert all(1 <= b - a <= 5 for a, b in itertools.pairwise(places))
