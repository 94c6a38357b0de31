"""The output head's log-probabilities and entropy against float64 autograd; its weight's gradient as Megatron's wrapper wants it."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from megaflow.actor import logprob
from megaflow.actor.logprob import Head, logp_and_entropy

VOCAB, PADDED, ROWS, HIDDEN = 100, 128, 37, 24


def inputs(dtype=torch.float32):
    g = torch.Generator().manual_seed(0)
    hidden, weight = torch.randn(ROWS, HIDDEN, generator=g), torch.randn(PADDED, HIDDEN, generator=g)
    return hidden.to(dtype), weight.to(dtype), torch.randint(0, VOCAB, (ROWS,), generator=g), torch.randn(2, ROWS, generator=g)


def by_autograd(hidden, weight, targets, temperature, weights):
    h, w = (x.detach().double().requires_grad_() for x in (hidden, weight))
    logp_of_all = (h @ w[:VOCAB].t() / temperature).log_softmax(-1)
    logp, entropy = logp_of_all.gather(1, targets[:, None])[:, 0], -(logp_of_all.exp() * logp_of_all).sum(-1)
    (weights[0].double() * logp + weights[1].double() * entropy).sum().backward()
    return logp.detach(), entropy.detach(), h.grad, w.grad


def ours(hidden, weight, targets, head, weights):
    h, w = (x.detach().clone().requires_grad_() for x in (hidden, weight))
    logp, entropy = logp_and_entropy(h, w, targets, head)
    loss = (weights[0] * logp).sum()
    (loss + (weights[1] * entropy).sum() if head.entropy_gradient else loss).backward()
    return logp.detach(), entropy.detach(), h.grad, w.grad


def worst_of_head(fused: bool, entropy_gradient: bool, dtype=torch.float32, device: str = "cpu", **settings) -> float:
    """Largest difference of logp, entropy and both gradients, relative to each tensor's largest entry."""
    hidden, weight, targets, weights = (x.to(device) for x in inputs(dtype))
    if not entropy_gradient:
        weights[1] = 0
    head = Head(VOCAB, temperature=0.7, fused=fused, entropy_gradient=entropy_gradient, **settings)
    found, expected = ours(hidden, weight, targets, head, weights), by_autograd(hidden, weight, targets, 0.7, weights)
    assert not found[3][VOCAB:].any(), "padded rows get no gradient"
    return max(float((a.double() - b).abs().max() / b.abs().max()) for a, b in zip(found, expected, strict=True))


ROW = PADDED * 4  # bytes of one row of logits


@pytest.mark.parametrize("entropy_gradient", [True, False])
@pytest.mark.parametrize(
    ("chunk", "elements", "keep"),
    [(1 << 30, 1 << 24, 1 << 32), (8 * ROW, 300, 1 << 32), (8 * ROW, 300, 0), (8 * ROW, 1 << 24, 20 * ROW)],
    ids=["one chunk", "chunks kept", "chunks computed again", "some kept"],
)
def test_values_and_gradients(entropy_gradient, chunk, elements, keep, monkeypatch):
    monkeypatch.setattr(logprob, "CHUNK_BYTES", chunk)
    monkeypatch.setattr(logprob, "CHUNK_ELEMENTS", elements)
    assert worst_of_head(False, entropy_gradient, keep_bytes=keep) < 5e-6


def test_logits_are_kept_within_their_budget(monkeypatch):
    monkeypatch.setattr(logprob, "CHUNK_BYTES", 8 * ROW)
    hidden, weight, targets, _ = inputs()
    for keep, expected in ((0, 0), (20 * ROW, 2), (1 << 32, 5)):  # 37 rows in 5 chunks of 8
        logp, _ = logp_and_entropy(hidden.requires_grad_(), weight, targets, Head(VOCAB, keep_bytes=keep))
        assert sum(chunk is not None for chunk in logp.grad_fn.kept) == expected
    with torch.no_grad():
        assert logp_and_entropy(hidden, weight, targets, Head(VOCAB))[0].grad_fn is None


def test_bfloat16_logits_are_summed_in_fp32():
    """The products are rounded to 16 bits; from there on nothing may be lost: compared with float64 of the same rounded logits."""
    g = torch.Generator().manual_seed(1)
    logits, targets = (torch.randn(16, 4096, generator=g) * 3).bfloat16(), torch.randint(0, 4096, (16,), generator=g)
    expected = logits.double().log_softmax(-1)
    logp, entropy = logp_and_entropy(logits, torch.eye(4096).bfloat16(), targets, Head(4096))
    torch.testing.assert_close(logp.double(), expected.gather(1, targets[:, None])[:, 0], rtol=1e-5, atol=2e-5)
    torch.testing.assert_close(entropy.double(), -(expected.exp() * expected).sum(-1), rtol=1e-5, atol=2e-5)


def test_bfloat16_gradients():
    assert worst_of_head(False, True, torch.bfloat16) < 2e-2


def test_greedy_is_the_distribution_at_temperature_one():
    hidden, weight, targets, _ = inputs()
    greedy, plain = (logp_and_entropy(hidden, weight, targets, Head(VOCAB, temperature=t)) for t in (0.0, 1.0))
    assert torch.equal(greedy[0], plain[0]) and torch.equal(greedy[1], plain[1])


@pytest.mark.parametrize("tied", [True, False])
def test_the_gradient_goes_into_main_grad(tied):
    """Megatron's hook adds param.grad to main_grad unless grad_added_to_main_grad is set, and for tied embeddings even then."""
    hidden, weight, targets, weights = inputs()
    expected = by_autograd(hidden, weight, targets, 1.0, weights)[3]
    w = weight.clone().requires_grad_()
    w.main_grad, w.grad_added_to_main_grad, w.zero_out_wgrad = torch.ones(PADDED, HIDDEN), False, tied
    logp, entropy = logp_and_entropy(hidden, w, targets, Head(VOCAB))
    embedded = w[targets] * 3 if tied else torch.zeros(1)
    (weights[0] * logp + weights[1] * entropy).sum().add(embedded.sum()).backward()
    assert w.grad_added_to_main_grad and w.grad is not None
    if tied:
        w.main_grad.add_(w.grad)
        expected = expected + 3 * torch.zeros_like(expected).index_add_(0, targets, torch.ones(ROWS, HIDDEN).double())
    torch.testing.assert_close(w.main_grad.double(), expected + 1, rtol=1e-5, atol=1e-4)


def test_a_rank_of_padding_alone_adds_nothing():
    """The second rank of 128 columns each holds no token of a vocabulary of 100; what it brings to the sums is 0 and never NaN."""
    hidden, weight, targets, weights = inputs()
    second = dataclasses.replace(Head(VOCAB), rank=1)
    softmax = logprob._Softmax(second, PADDED, targets)
    peak, sums = torch.empty(ROWS), torch.empty(3, ROWS)
    softmax.sums(hidden @ weight.t(), slice(0, ROWS), peak, sums)
    assert (peak < -1e29).all() and not sums.any()
    logits = hidden @ weight.t()
    softmax.gradient(logits, slice(0, ROWS), torch.zeros(ROWS), torch.zeros(ROWS), weights[0], weights[1])
    assert not logits.any()


def test_no_rows():
    hidden, weight = torch.zeros(0, HIDDEN, requires_grad=True), torch.zeros(64, HIDDEN, requires_grad=True)
    logp, entropy = logp_and_entropy(hidden, weight, torch.zeros(0, dtype=torch.int64), Head(60))
    (logp.sum() + entropy.sum()).backward()
    assert logp.shape == entropy.shape == (0,) and hidden.grad.shape == (0, HIDDEN) and not weight.grad.any()
