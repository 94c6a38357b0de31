"""What CPU tests cannot reach of the other axes: the flash kernel over pieces of sequences, and with values shorter than keys; the
product of all experts at once."""

from __future__ import annotations

import math

import pytest
import torch

from tests.unit import test_actor_experts
from tests.unit.test_actor_context import LENGTHS, attention_of_ranks, random_qkv, whole_attention

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


def relative(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found.double() - expected).norm() / expected.norm())


@pytest.mark.parametrize("cp", [1, 2])
def test_varlen_by_piece_is_attention_of_whole_sequences(cp):
    """bf16 against float64: a relative error of 3e-3 was measured for whole sequences, so a mask in the wrong place shows."""
    qkv = random_qkv("cuda", torch.bfloat16)
    exact = [x.double() for x in qkv]
    expected = torch.cat([whole_attention(*(x.split(LENGTHS)[i] for x in exact)) for i in range(len(LENGTHS))])
    assert relative(attention_of_ranks(*qkv, cp, "_varlen"), expected) < 1e-2


def test_varlen_with_values_shorter_than_keys():
    from megaflow.actor.latent import LatentPackedAttention
    from megaflow.actor.packing import Packed

    g = torch.Generator().manual_seed(0)
    heads, dims = 4, (192, 192, 128)  # DeepSeek-V3's
    qkv = [torch.randn(sum(LENGTHS), heads, d, generator=g).to("cuda", torch.bfloat16) for d in dims]
    attention = LatentPackedAttention.__new__(LatentPackedAttention)
    torch.nn.Module.__init__(attention)
    attention.scale = 1 / math.sqrt(192)
    found = attention._varlen(*qkv, Packed.of(LENGTHS, torch.device("cuda")))
    expected = []
    for q, k, v in zip(*(x.double().split(LENGTHS) for x in qkv), strict=True):
        scores = torch.einsum("qhd,khd->hqk", q, k) / math.sqrt(192)
        seen = torch.ones(len(q), len(q), dtype=torch.bool, device="cuda").tril()
        expected.append(torch.einsum("hqk,khd->qhd", scores.masked_fill(~seen, -math.inf).softmax(-1), v))
    assert found.shape == (sum(LENGTHS), heads, 128)
    assert relative(found, torch.cat(expected)) < 1e-2


@pytest.mark.parametrize("step", test_actor_experts.STEPS)
@pytest.mark.parametrize("counts", test_actor_experts.COUNTS)
def test_grouped_experts_against_a_loop_in_float64(counts, step):
    """Row counts that are no multiples of anything, and experts without rows, through the kernel."""
    test_actor_experts.check(test_actor_experts.COUNTS[counts], test_actor_experts.STEPS[step], torch.bfloat16, 1e-2, "cuda")
