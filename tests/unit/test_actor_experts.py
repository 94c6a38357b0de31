"""Grouped experts: outputs, gradients and Megatron's fp32 sums against a loop in float64, with experts that get no rows."""

from __future__ import annotations

import pytest
import torch

from megaflow.actor.experts import GroupedLinear, LastFirst, as_one, use_grouped
from megaflow.shape import Experts, ModelShape
from megaflow.types import ConfigError

OUT, IN = 24, 16
COUNTS = {"some get none": [0, 5, 3, 0, 9], "one gets all": [0, 0, 7, 0, 0], "no rows": [0] * 5, "the last gets none": [2, 1, 1, 4, 0]}
STEPS = {"side by side": OUT * IN, "with others between": OUT * IN + 40, "too close, copied": OUT * IN // 2}


def lying(count: int, step: int, dtype: torch.dtype, draw) -> list[torch.Tensor]:
    """`count` matrices [OUT, IN] in one storage, `step` elements apart; overlapping ones are given storages of their own."""
    drawn = [draw(OUT, IN) for _ in range(count)]
    storage = torch.zeros(count * step + OUT * IN, dtype=dtype, device=drawn[0].device)
    placed = [storage[i * step :][: OUT * IN].view(OUT, IN) for i in range(count)]
    made = placed if step >= OUT * IN else [torch.empty_like(d, dtype=dtype) for d in drawn]
    return [t.copy_(d) for t, d in zip(made, drawn, strict=True)]


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("counts", COUNTS)
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-6), (torch.bfloat16, 1e-2)])
def test_against_a_loop_in_float64(counts, step, dtype, tolerance):
    check(COUNTS[counts], STEPS[step], dtype, tolerance)


def check(counts: list[int], step: int, dtype: torch.dtype, tolerance: float, device: str = "cpu") -> None:
    """tolerance: of a tensor's largest entry, 1 at least."""
    g = torch.Generator().manual_seed(0)

    def draw(*shape):
        return torch.randn(*shape, generator=g).to(device)

    weights = [torch.nn.Parameter(w) for w in lying(len(counts), step, dtype, draw)]
    sums = lying(len(counts), step, torch.float32, draw)
    x, grad = draw(sum(counts), IN).to(dtype).requires_grad_(), draw(sum(counts), OUT).to(dtype)
    exact_x = x.detach().double().requires_grad_()
    exact = [w.detach().double().requires_grad_() for w in weights]
    expected = torch.cat([rows @ w.T for rows, w in zip(exact_x.split(counts), exact, strict=True)])
    expected.backward(grad.double())

    ends = torch.tensor(counts, device=device).cumsum(0).int()
    found = GroupedLinear.apply(x, ends, *weights)
    found.backward(grad)
    assert (as_one(weights).data_ptr() == weights[0].data_ptr()) == (step >= OUT * IN)
    pairs = [(found, expected), (x.grad, exact_x.grad), *((w.grad, e.grad) for w, e in zip(weights, exact, strict=True))]
    for ours, right in pairs:
        torch.testing.assert_close(ours.double(), right, rtol=0, atol=tolerance * max([1.0, *right.abs().flatten().tolist()]))

    before = [s.double() for s in sums]
    for w, total in zip(weights, sums, strict=True):
        w.main_grad, w.grad_added_to_main_grad = total, False
    GroupedLinear.apply(x, ends, *weights).backward(grad)
    for w, e, start in zip(weights, exact, before, strict=True):
        assert w.grad_added_to_main_grad, "Megatron's hook must not add it again"
        torch.testing.assert_close(w.main_grad.double(), start + e.grad, rtol=0, atol=tolerance * max(1.0, float(e.grad.abs().max())))


def test_last_first_keeps_numbers_and_turns_the_order_of_parameters():
    linears = [torch.nn.Linear(1, i + 1, bias=False) for i in range(12)]
    listed = LastFirst(linears)
    assert list(listed) == linears and listed[10] is linears[10] and len(listed) == 12
    assert [n for n, _ in listed.named_parameters()] == [f"{i}.weight" for i in reversed(range(12))]


def test_sizes_that_the_kernel_cannot_take():
    experts = Experts(count=4, top_k=2, ffn_size=20, layers=(True,))
    shape = ModelShape("qwen3_moe", 1, 16, 32, 2, 1, 8, 64, 64, 1e-6, 1e4, False, False, True, experts=experts)
    with pytest.raises(ConfigError, match=r"model.experts=grouped needs rows of a multiple of 16 bytes, and expert's size 10 is not"):
        use_grouped("grouped", shape, 2, torch.float32)
    assert not use_grouped("auto", shape, 2, torch.float32)
    assert use_grouped("grouped", shape, 1, torch.float32)
