"""A weight's gradient added to its fp32 sum by the matrix product itself, without a 16-bit gradient between."""

from __future__ import annotations

import functools
import logging

import torch
from torch import Tensor

log = logging.getLogger(__name__)


def add_product(total: Tensor, grad_output: Tensor, inputs: Tensor) -> None:
    """total [out, in] += grad_output [n, out].T @ inputs [n, in]."""
    if grad_output.shape[0] == 0:
        return
    if total.dtype == grad_output.dtype:
        total.addmm_(grad_output.t(), inputs)
    elif accumulates_in_fp32(grad_output.dtype, grad_output.device):
        torch.addmm(total, grad_output.t(), inputs, out_dtype=total.dtype, out=total)
    else:
        total.add_(grad_output.t() @ inputs)


@functools.cache
def accumulates_in_fp32(dtype: torch.dtype, device: torch.device) -> bool:
    """Whether a product of 16-bit matrices can be added to an fp32 matrix in one call (cuBLAS can; CPU kernels cannot). Tried once."""
    if device.type != "cuda":
        return False
    a, b = (torch.randint(-3, 4, (64, size), device=device).to(dtype) for size in (256, 128))
    total = torch.full((256, 128), 0.5, device=device)
    try:
        torch.addmm(total, a.t(), b, out_dtype=torch.float32, out=total)
    except RuntimeError as e:
        log.info("weight gradients: through 16-bit products (%s)", str(e).splitlines()[0])
        return False
    works = torch.equal(total, a.float().t() @ b.float() + 0.5)  # small integers: exact whatever computes them
    log.info("weight gradients: %s", "added in fp32 by the product itself" if works else "through 16-bit products")
    return works
