"""Log-probabilities and entropy against float64 autograd."""

from __future__ import annotations

import pytest
import torch

from megaflow.actor import logprob
from megaflow.actor.logprob import logp_and_entropy


def by_autograd(logits, targets, vocab_size, temperature, weights):
    x = logits.double()[:, :vocab_size].clone().requires_grad_()
    p = (x / temperature).log_softmax(-1)
    logp, entropy = p.gather(1, targets[:, None])[:, 0], -(p.exp() * p).sum(-1)
    (weights[0] * logp + weights[1] * entropy).sum().backward()
    return logp.detach(), entropy.detach(), x.grad


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("chunk", [1 << 24, 300])
def test_values_and_gradients(temperature, chunk, monkeypatch):
    monkeypatch.setattr(logprob, "CHUNK_ELEMENTS", chunk)
    g = torch.Generator().manual_seed(0)
    logits, targets = torch.randn(37, 128, generator=g) * 5, torch.randint(0, 100, (37,), generator=g)
    weights = torch.randn(2, 37, generator=g).double()
    expected = by_autograd(logits, targets, 100, temperature, weights)
    leaf = logits.clone().requires_grad_()
    logp, entropy = logp_and_entropy(leaf * 1, targets, vocab_size=100, temperature=temperature)
    (weights[0].float() * logp + weights[1].float() * entropy).sum().backward()
    torch.testing.assert_close(logp.double(), expected[0], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(entropy.double(), expected[1], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(leaf.grad[:, :100].double(), expected[2], rtol=1e-4, atol=1e-5)
    assert not leaf.grad[:, 100:].any(), "padded columns get no gradient"


def test_bfloat16_logits_are_summed_in_fp32():
    g = torch.Generator().manual_seed(1)
    logits, targets = (torch.randn(16, 4096, generator=g) * 3).bfloat16(), torch.randint(0, 4096, (16,), generator=g)
    expected = by_autograd(logits, targets, 4096, 1.0, torch.ones(2, 16).double())
    logp, entropy = logp_and_entropy(logits.clone(), targets, vocab_size=4096)
    torch.testing.assert_close(logp.double(), expected[0], rtol=1e-5, atol=2e-5)
    torch.testing.assert_close(entropy.double(), expected[1], rtol=1e-5, atol=2e-5)


def test_the_gradient_takes_the_place_of_the_logits():
    logits = torch.randn(5, 64).requires_grad_()
    middle = logits * 1
    logp, _ = logp_and_entropy(middle, torch.zeros(5, dtype=torch.int64), vocab_size=64)
    address = middle.data_ptr()
    seen = []
    middle.register_hook(lambda grad: seen.append(grad.data_ptr()))
    logp.sum().backward()
    assert seen == [address]


def test_no_rows():
    logits = torch.zeros(0, 64, requires_grad=True)
    logp, entropy = logp_and_entropy(logits * 1, torch.zeros(0, dtype=torch.int64), vocab_size=60)
    (logp.sum() + entropy.sum()).backward()
    assert logp.shape == entropy.shape == (0,)
