"""Which implementation an operation takes, fused (Triton) or plain torch, and the differentiable form of the fused ones."""

from __future__ import annotations

import functools
import importlib.util
import logging
import os

import torch
import torch.nn.functional as F
from torch import Tensor

from megaflow.parallel.device import on_cuda
from megaflow.types import ConfigError

log = logging.getLogger(__name__)
OPERATIONS = ("RMSNorm", "SwiGLU", "rotary", "softmax of the output head")


@functools.cache
def use_fused(choice: str) -> bool:
    """choice: `model.kernels`. auto: fused where there is a GPU and Triton. The log says once what was taken.

    Raises ConfigError when fused is asked for and cannot be had.
    """
    interpreted = os.environ.get("TRITON_INTERPRET") == "1"
    missing = [
        *(["the package triton"] if importlib.util.find_spec("triton") is None else []),
        *(["an NVIDIA GPU"] if not (on_cuda() or interpreted) else []),
    ]
    if choice == "fused" and missing:
        raise ConfigError(f"model.kernels=fused needs {' and '.join(missing)}; use auto or plain")
    fused = choice == "fused" or (choice == "auto" and not missing and not interpreted)
    why = f" (no {missing[0].removeprefix('the ').removeprefix('an ')})" if choice == "auto" and missing else ""
    log.info("kernels: %s: %s%s", ", ".join(OPERATIONS), "Triton" if fused else "plain torch", why)
    return fused


def rms_norm(x: Tensor, weight: Tensor, eps: float, fused: bool) -> Tensor:
    """x [..., H] -> the same shape. Zhang & Sennrich 2019, equation 4: x / sqrt(mean(x^2) + eps) * weight."""
    if not fused:
        return F.rms_norm(x, (x.shape[-1],), weight, eps)
    return _RMSNorm.apply(x, weight, eps)


def swiglu(x: Tensor, fused: bool) -> Tensor:
    """x [..., 2F], gate | up -> silu(gate) * up [..., F]. Shazeer 2020 (arXiv:2002.05202) equation 6, without the matrices."""
    if not fused:
        gate, up = x.chunk(2, -1)
        return F.silu(gate) * up
    return _SwiGLU.apply(x)


def rotary(x: Tensor, positions: Tensor, cos: Tensor, sin: Tensor, fused: bool) -> Tensor:
    """x [T, heads, d], positions [T], cos and sin [P, d/2] fp32 -> [T, heads, d]: pairs (i, i + d/2) turned by their angle.

    Su et al. 2021 (RoFormer) equation 34, with the pairs as Hugging Face's weights have them.
    """
    if fused:
        return _Rotary.apply(x, positions, cos, sin)
    c, s = (table[positions][:, None].to(x.dtype) for table in (cos, sin))  # [T, 1, d/2]
    first, second = x.chunk(2, -1)
    return torch.cat((first * c - second * s, second * c + first * s), -1)


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, eps):
        from megaflow.actor import kernels

        flat = x.reshape(-1, x.shape[-1]).contiguous()
        y, scale = kernels.rms_forward(flat, weight, eps)
        ctx.save_for_backward(flat, weight, scale)
        return y.view(x.shape)

    @staticmethod
    def backward(ctx, grad):
        from megaflow.actor import kernels

        flat, weight, scale = ctx.saved_tensors
        dx, dw = kernels.rms_backward(grad.reshape(flat.shape).contiguous(), flat, weight, scale)
        return dx.view(grad.shape), dw.to(weight.dtype), None


class _SwiGLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        from megaflow.actor import kernels

        flat = x.reshape(-1, x.shape[-1]).contiguous()
        ctx.save_for_backward(flat)
        return kernels.swiglu_forward(flat).view(*x.shape[:-1], -1)

    @staticmethod
    def backward(ctx, grad):
        from megaflow.actor import kernels

        (flat,) = ctx.saved_tensors
        dx = kernels.swiglu_backward(grad.reshape(flat.shape[0], -1).contiguous(), flat)
        return dx.view(*grad.shape[:-1], -1)


class _Rotary(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, positions, cos, sin):
        from megaflow.actor import kernels

        ctx.save_for_backward(positions, cos, sin)
        return kernels.rotate(x, positions, cos, sin, back=False)

    @staticmethod
    def backward(ctx, grad):
        from megaflow.actor import kernels

        return kernels.rotate(grad if grad.stride(-1) == 1 else grad.contiguous(), *ctx.saved_tensors, back=True), None, None, None
