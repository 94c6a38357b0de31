"""Context parallelism: the pieces of all ranks together are the pack, and their attention is that of whole sequences in float64."""

from __future__ import annotations

import math

import pytest
import torch

from megaflow.parallel import megatron_shim

megatron_shim.install()

from megaflow.actor.context import Context  # noqa: E402 (Megatron may be imported after the shim only)
from megaflow.actor.modules import PackedAttention  # noqa: E402
from megaflow.actor.packing import Packed, make_micro_batch  # noqa: E402
from megaflow.parallel.mesh import Axis  # noqa: E402
from tests import tiny  # noqa: E402

LENGTHS = [8, 16, 4, 12]
HEADS, KV_HEADS, DIM = 4, 2, 16


def axis(cp: int, rank: int) -> Axis:
    return Axis(cp, rank, None, tuple(range(cp)))


def whole_attention(q, k, v) -> torch.Tensor:
    """[T, heads, d] of one sequence in float64, written out."""
    k, v = (x.repeat_interleave(HEADS // KV_HEADS, 1) for x in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q, k) / math.sqrt(DIM)
    seen = torch.ones(len(q), len(q), dtype=torch.bool, device=q.device).tril()
    return torch.einsum("hqk,khd->qhd", scores.masked_fill(~seen, -math.inf).softmax(-1), v)


def attention_of_ranks(q, k, v, cp: int, method: str, lengths=LENGTHS) -> torch.Tensor:
    """As all ranks would compute it, put together: [T, heads, d]."""
    attention = PackedAttention.__new__(PackedAttention)
    torch.nn.Module.__init__(attention)
    attention.scale = 1 / math.sqrt(DIM)
    packs = [Packed.of(lengths, q.device, axis(cp, r)) for r in range(cp)]
    order = torch.cat([p.context.mine for p in packs])  # what a gather over the group brings
    out = torch.empty_like(q)
    for packed in packs:
        mine = packed.context.mine
        keys, values = (x[order][packed.context.keys] for x in (k, v))
        out[mine] = getattr(attention, method)(q[mine], keys, values, packed)
    return out


def random_qkv(device="cpu", dtype=torch.float64):
    g = torch.Generator().manual_seed(0)
    sizes = (HEADS, KV_HEADS, KV_HEADS)
    return [torch.randn(sum(LENGTHS), n, DIM, generator=g, dtype=torch.float64).to(device, dtype) for n in sizes]


@pytest.mark.parametrize("cp", [1, 2])
def test_attention_by_piece_is_attention_of_whole_sequences(cp):
    q, k, v = random_qkv()
    expected = torch.cat([whole_attention(*(x.split(LENGTHS)[i] for x in (q, k, v))) for i in range(len(LENGTHS))])
    torch.testing.assert_close(attention_of_ranks(q, k, v, cp, "_by_piece"), expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("cp", [2, 4])
def test_the_ranks_share_the_work_of_a_causal_mask_evenly(cp):
    lengths = [8 * cp, 24 * cp]
    contexts = [Context.of(lengths, axis(cp, r), torch.device("cpu")) for r in range(cp)]
    assert sorted(torch.cat([c.mine for c in contexts]).tolist()) == list(range(32 * cp))
    assert len({sum(queries * keys for queries, keys in c.pieces) for c in contexts}) == 1


@pytest.mark.parametrize("multiple", [1, 4])
def test_every_response_token_is_predicted_on_one_rank(multiple):
    cp, samples = 2, tiny.samples(5, 100)
    whole = make_micro_batch(samples, torch.device("cpu"))
    parts = [make_micro_batch(samples, torch.device("cpu"), multiple, axis(cp, r)) for r in range(cp)]
    assert len({p.num_tokens for p in parts}) == 1 and parts[0].num_tokens % multiple == 0
    assert sorted(torch.cat([p.slots for p in parts]).tolist()) == list(range(len(whole.rows)))
    for part in parts:
        assert torch.equal(part.targets, whole.targets[part.slots])
        assert torch.equal(part.tokens[0, part.rows], whole.tokens[0, whole.rows[part.slots]]), "the token before the one it predicts"
        assert torch.equal(part.packed.positions[part.rows], whole.packed.positions[whole.rows[part.slots]])
