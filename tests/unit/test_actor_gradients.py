"""Weight gradients added to main_grad, also by Megatron's own linear layer."""

from __future__ import annotations

import importlib.util

import pytest
import torch

from megaflow.actor.gradients import add_product


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 2e-2)])
def test_sum_of_products_against_float64(dtype, tolerance):
    g = torch.Generator().manual_seed(0)
    total = torch.randn(6, 5, generator=g)
    expected = total.double()
    for n in (7, 0, 3):
        grad, inputs = (torch.randn(n, size, generator=g).to(dtype) for size in (6, 5))
        add_product(total, grad, inputs)
        expected = expected + grad.double().t() @ inputs.double()
    assert float((total.double() - expected).abs().max() / expected.abs().max()) < tolerance


def test_megatron_needs_a_stand_in_for_the_extension_of_apex():
    """When this fails, an extension is there, and Megatron's layers take it without us."""
    assert importlib.util.find_spec("fused_weight_gradient_mlp_cuda") is None
    from megatron.core.tensor_parallel import layers

    from megaflow.parallel import megatron_shim

    megatron_shim.offer_weight_gradient(add_product)
    weight = torch.zeros(2, 3)
    layers.fused_weight_gradient_mlp_cuda.wgrad_gemm_accum_fp32(torch.ones(4, 3), torch.full((4, 2), 2.0), weight)
    assert layers._grad_accum_fusion_available and weight.tolist() == [[8.0] * 3] * 2
