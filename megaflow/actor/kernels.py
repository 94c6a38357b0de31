"""Triton kernels: RMSNorm, SwiGLU, rotary, and the softmax of the output head. Called by fused.py only, which knows when to.

Every kernel computes in fp32 whatever the tensors' dtype. They run on a CPU too, slowly, with TRITON_INTERPRET=1: the tests do that.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

TILE = 4096  # elements that one program of the norm holds at once
NORM_PROGRAMS = 512  # programs of the norm's backward pass; each leaves one partial sum of the weight's gradient
COLUMNS = 4096  # of the vocabulary, at a time
LANES = 1024  # of the MLP's hidden layer: 16 bytes a thread, and little of the last block is empty


def rms_forward(x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """x [N, H] contiguous -> (y [N, H], 1 / rms of each row [N] fp32)."""
    rows, size = x.shape
    y, scale = x.new_empty(x.shape), x.new_empty(rows, dtype=torch.float32)
    block, tile = _row_tile(size)
    if rows:
        _rms_forward[(triton.cdiv(rows, tile),)](x, weight, y, scale, rows, eps, size, block, tile, num_warps=_warps(block * tile))
    return y, scale


def rms_backward(grad: Tensor, x: Tensor, weight: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    """-> (dx [N, H], dw [H] fp32)."""
    rows, size = x.shape
    block, tile = _row_tile(size)
    programs = max(1, min(NORM_PROGRAMS, triton.cdiv(rows, tile)))
    dx, partial = x.new_empty(x.shape), x.new_empty(programs, size, dtype=torch.float32)
    _rms_backward[(programs,)](grad, x, weight, scale, dx, partial, rows, size, block, tile, num_warps=_warps(block * tile))
    return dx, partial.sum(0)


def swiglu_forward(x: Tensor) -> Tensor:
    """x [N, 2F] contiguous, gate | up -> silu(gate) * up [N, F]."""
    rows, size = x.shape[0], x.shape[1] // 2
    y = x.new_empty(rows, size)
    if rows:
        _swiglu_forward[(rows, triton.cdiv(size, LANES))](x, y, size, LANES, num_warps=4)
    return y


def swiglu_backward(grad: Tensor, x: Tensor) -> Tensor:
    """-> dx [N, 2F]."""
    rows, size = x.shape[0], x.shape[1] // 2
    dx = x.new_empty(x.shape)
    if rows:
        _swiglu_backward[(rows, triton.cdiv(size, LANES))](grad, x, dx, size, LANES, num_warps=4)
    return dx


def rotate(x: Tensor, positions: Tensor, cos: Tensor, sin: Tensor, back: bool) -> Tensor:
    """x [T, heads, d], the last axis dense; cos, sin [P, d/2] fp32 -> x turned by its positions' angles, dense. back: the other way."""
    tokens, heads, dim = x.shape
    assert x.stride(2) == 1 and cos.is_contiguous() and sin.is_contiguous(), (x.stride(), cos.stride())
    y = x.new_empty(tokens, heads, dim)
    if tokens:
        half = dim // 2
        blocks = (triton.next_power_of_2(heads), triton.next_power_of_2(half))
        sign = -1.0 if back else 1.0
        _rotate[(tokens,)](x, positions, cos, sin, y, x.stride(0), x.stride(1), heads, half, sign, *blocks, num_warps=4)
    return y


def softmax_sums(logits: Tensor, columns: Tensor, width: int, temperature: float, peak: Tensor, sums: Tensor) -> None:
    """Of x = logits[:, :width] / temperature: peak [r] = max x; sums [3, r]: sum exp(x - peak), sum x exp(x - peak), x[columns].

    logits [r, V/tp] with dense rows. A column outside [0, width) leaves 0 in the third. Written into `peak` and `sums`, fp32.
    """
    rows = logits.shape[0]
    if rows:
        arguments = (logits, columns, peak, sums, logits.stride(0), sums.stride(0), width, 1.0 / temperature)
        _softmax_sums[(rows,)](*arguments, COLUMNS, num_warps=8)


def softmax_gradient(logits: Tensor, columns: Tensor, width: int, temperature: float, lse, entropy, grad_logp, grad_entropy) -> None:
    """Overwrites logits [r, V/tp] with the gradient; lse, entropy, grad_logp, grad_entropy (or None) [r] fp32."""
    rows, size = logits.shape
    if rows:
        has_entropy = grad_entropy is not None
        per_row = (columns, lse, entropy, grad_logp, grad_entropy if has_entropy else grad_logp)
        arguments = (logits, *per_row, logits.stride(0), width, size, 1.0 / temperature)
        _softmax_gradient[(rows, triton.cdiv(size, COLUMNS))](*arguments, has_entropy, COLUMNS, num_warps=8)


def _row_tile(size: int) -> tuple[int, int]:
    """(columns rounded up, rows) of a program's tile: narrow rows, as of a head's norm, go several to a program."""
    block = triton.next_power_of_2(size)
    return block, max(1, TILE // block)


def _warps(elements: int) -> int:
    return 4 if elements <= 2048 else 8 if elements <= 8192 else 16


@triton.jit
def _rms_forward(x, weight, y, scale, rows, eps, SIZE: tl.constexpr, BLOCK: tl.constexpr, TILE: tl.constexpr):
    row = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    column = tl.arange(0, BLOCK)
    inside = (row < rows)[:, None] & (column < SIZE)[None, :]
    at = row[:, None] * SIZE + column[None, :]
    value = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
    w = tl.load(weight + column, mask=column < SIZE, other=0.0).to(tl.float32)
    inverse = 1.0 / tl.sqrt(tl.sum(value * value, 1) / SIZE + eps)
    tl.store(scale + row, inverse, mask=row < rows)
    tl.store(y + at, (value * inverse[:, None] * w[None, :]).to(y.dtype.element_ty), mask=inside)


@triton.jit
def _rms_backward(grad, x, weight, scale, dx, partial, rows, SIZE: tl.constexpr, BLOCK: tl.constexpr, TILE: tl.constexpr):
    column = tl.arange(0, BLOCK)
    w = tl.load(weight + column, mask=column < SIZE, other=0.0).to(tl.float32)
    dw = tl.zeros((BLOCK,), dtype=tl.float32)
    for start in range(tl.program_id(0) * TILE, rows, tl.num_programs(0) * TILE):
        row = start + tl.arange(0, TILE).to(tl.int64)
        inside = (row < rows)[:, None] & (column < SIZE)[None, :]
        at = row[:, None] * SIZE + column[None, :]
        g = tl.load(grad + at, mask=inside, other=0.0).to(tl.float32)
        inverse = tl.load(scale + row, mask=row < rows, other=0.0)
        normal = tl.load(x + at, mask=inside, other=0.0).to(tl.float32) * inverse[:, None]
        dw += tl.sum(g * normal, 0)
        gw = g * w[None, :]
        mean = tl.sum(gw * normal, 1) / SIZE
        tl.store(dx + at, (inverse[:, None] * (gw - normal * mean[:, None])).to(dx.dtype.element_ty), mask=inside)
    tl.store(partial + tl.program_id(0) * SIZE + column, dw, mask=column < SIZE)


@triton.jit
def _swiglu_forward(x, y, size, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < size
    gate = tl.load(x + row * 2 * size + column, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(x + row * 2 * size + size + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(y + row * size + column, (gate * tl.sigmoid(gate) * up).to(y.dtype.element_ty), mask=inside)


@triton.jit
def _swiglu_backward(grad, x, dx, size, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < size
    g = tl.load(grad + row * size + column, mask=inside, other=0.0).to(tl.float32)
    gate = tl.load(x + row * 2 * size + column, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(x + row * 2 * size + size + column, mask=inside, other=0.0).to(tl.float32)
    s = tl.sigmoid(gate)
    d_gate = g * up * s * (1.0 + gate * (1.0 - s))
    tl.store(dx + row * 2 * size + column, d_gate.to(dx.dtype.element_ty), mask=inside)
    tl.store(dx + row * 2 * size + size + column, (g * gate * s).to(dx.dtype.element_ty), mask=inside)


@triton.jit
def _rotate(x, positions, cos, sin, y, stride_t, stride_h, heads, half, sign, HEADS: tl.constexpr, HALF: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    head, pair = tl.arange(0, HEADS), tl.arange(0, HALF)
    angle = tl.load(positions + token) * half + pair
    c = tl.load(cos + angle, mask=pair < half, other=0.0)[None, :]
    s = tl.load(sin + angle, mask=pair < half, other=0.0)[None, :] * sign
    inside = (head < heads)[:, None] & (pair < half)[None, :]
    source = x + token * stride_t + head[:, None] * stride_h + pair[None, :]
    first = tl.load(source, mask=inside, other=0.0).to(tl.float32)
    second = tl.load(source + half, mask=inside, other=0.0).to(tl.float32)
    target = y + (token * heads + head[:, None]) * 2 * half + pair[None, :]
    tl.store(target, (first * c - second * s).to(y.dtype.element_ty), mask=inside)
    tl.store(target + half, (second * c + first * s).to(y.dtype.element_ty), mask=inside)


@triton.jit
def _softmax_sums(logits, columns, peak, sums, stride, sums_stride, width, inverse_t, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    base = logits + row * stride
    largest = -1e30  # finite, so that a rank of padding alone adds 0 and not NaN
    mass = 0.0
    weighted = 0.0
    for start in range(0, width, BLOCK):
        column = start + tl.arange(0, BLOCK)
        x = tl.load(base + column, mask=column < width, other=-float("inf")).to(tl.float32) * inverse_t
        new = tl.maximum(largest, tl.max(x, 0))
        e = tl.exp(x - new)
        shrink = tl.exp(largest - new)
        mass = mass * shrink + tl.sum(e, 0)
        weighted = weighted * shrink + tl.sum(tl.where(column < width, x, 0.0) * e, 0)
        largest = new
    target = tl.load(columns + row)
    mine = (target >= 0) & (target < width)
    chosen = tl.load(base + tl.where(mine, target, 0), mask=mine, other=0.0).to(tl.float32) * inverse_t
    tl.store(peak + row, largest)
    tl.store(sums + row, mass)
    tl.store(sums + sums_stride + row, weighted)
    tl.store(sums + 2 * sums_stride + row, chosen)


@triton.jit
def _softmax_gradient(
    logits, columns, lse, entropy, grad_logp, grad_entropy, stride, width, size, inverse_t, ENTROPY: tl.constexpr, BLOCK: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    at = logits + row * stride + column
    g = tl.load(grad_logp + row)
    logp = tl.load(at, mask=column < width, other=-float("inf")).to(tl.float32) * inverse_t - tl.load(lse + row)
    p = tl.exp(logp)
    # d logp / d x_j = [j is target] - p_j;   d entropy / d x_j = -p_j (log p_j + entropy)
    grad = tl.where(column == tl.load(columns + row), g, 0.0) - p * g
    if ENTROPY:
        grad -= tl.load(grad_entropy + row) * p * tl.where(column < width, logp + tl.load(entropy + row), 0.0)
    tl.store(at, tl.where(column < width, grad * inverse_t, 0.0).to(logits.dtype.element_ty), mask=column < size)
