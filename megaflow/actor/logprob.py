"""Output head, log-probabilities and entropy as one operation, over chunks of rows: [R, V] never exists in fp32.

The 16-bit logits of as many chunks as fit a budget are kept for the backward pass, which turns them into their own gradient in place; the
others are computed again there (a third more work of the head, no memory).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from megatron.core.tensor_parallel.mappings import copy_to_tensor_model_parallel_region, gather_from_sequence_parallel_region
from torch import Tensor
from torch.autograd.function import once_differentiable

from megaflow.actor.gradients import add_product

CHUNK_BYTES = 1 << 30  # logits of one chunk
CHUNK_ELEMENTS = 1 << 24  # of the plain path: fp32 elements that are live at once, 64 MiB


@dataclass(frozen=True)
class Head:
    """What does not change from pack to pack.

    vocab_size        V without padding: columns beyond it are no tokens
    temperature       the distribution is softmax(logits / temperature); 0 (greedy): of the plain logits
    rank, group       this rank's columns are rank * V/tp onward, of the vocabulary split over `group`
    entropy_gradient  False: entropy is a figure only, and its gradient costs nothing
    keep_bytes        logits that may be kept for the backward pass
    fused             Triton kernels; False: plain torch
    """

    vocab_size: int
    temperature: float = 1.0
    rank: int = 0
    group: dist.ProcessGroup | None = None
    entropy_gradient: bool = True
    keep_bytes: int = 1 << 32
    fused: bool = False


def logp_and_entropy(hidden: Tensor, weight: Tensor, targets: Tensor, head: Head) -> tuple[Tensor, Tensor]:
    """Of the softmax of hidden @ weight.T.

    hidden [R, H], weight [V/tp, H], targets [R] int64 -> logp [R], entropy [R], fp32, the same on every rank of the group.
    The gradient of hidden is this rank's part of a sum over the group. That of weight goes into `weight.main_grad` where Megatron's
    data-parallel wrapper has made one, as Megatron's own linear layers do.
    """
    return _LinearLogp.apply(hidden, weight, targets, head, torch.is_grad_enabled())


def response_rows(hidden: Tensor, rows: Tensor, sequence_parallel: bool, group: dist.ProcessGroup) -> Tensor:
    """hidden [T, 1, H] (megatron; [T/tp, 1, H] under sequence parallelism), rows [R] -> [R, H], whose gradient is summed over tp."""
    if sequence_parallel:
        return gather_from_sequence_parallel_region(hidden, tensor_parallel_output_grad=True, group=group)[:, 0].index_select(0, rows)
    return copy_to_tensor_model_parallel_region(hidden[:, 0].index_select(0, rows), group=group)


class _LinearLogp(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden, weight, targets, head: Head, with_grad: bool):
        softmax = _Softmax(head, weight.shape[0], targets)
        peak = hidden.new_empty(len(targets), dtype=torch.float32)
        sums = hidden.new_empty(3, len(targets), dtype=torch.float32)
        chunks = _row_chunks(len(targets), weight.shape[0] * hidden.element_size())
        kept: list[Tensor | None] = []
        room = head.keep_bytes if with_grad else 0
        for rows in chunks:
            logits = hidden[rows] @ weight.t()  # [r, V/tp]
            softmax.sums(logits, rows, peak, sums)
            room -= logits.nbytes
            kept.append(logits if room >= 0 else None)
        logp, lse, entropy = _combine(peak, sums, head.group)
        ctx.save_for_backward(hidden, weight, lse, entropy)
        ctx.softmax, ctx.chunks, ctx.kept, ctx.head = softmax, chunks, kept, head
        ctx.set_materialize_grads(False)
        if not head.entropy_gradient:
            entropy = entropy.clone()
            ctx.mark_non_differentiable(entropy)
        return logp, entropy

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_logp, grad_entropy):
        hidden, weight, lse, entropy = ctx.saved_tensors
        if grad_logp is None and grad_entropy is None:
            return (None,) * 5
        grad_logp = torch.zeros_like(lse) if grad_logp is None else grad_logp.contiguous()
        grad_entropy = grad_entropy.contiguous() if grad_entropy is not None and ctx.head.entropy_gradient else None
        d_hidden = torch.empty_like(hidden) if ctx.needs_input_grad[0] else None
        d_weight = WeightGradient(weight) if ctx.needs_input_grad[1] else None
        for i, rows in enumerate(ctx.chunks):
            logits, ctx.kept[i] = ctx.kept[i], None  # a second backward pass would find them overwritten
            if logits is None:
                logits = hidden[rows] @ weight.t()
            ctx.softmax.gradient(logits, rows, lse, entropy, grad_logp, grad_entropy)
            if d_hidden is not None:
                torch.mm(logits, weight, out=d_hidden[rows])
            if d_weight is not None:
                d_weight.add(logits, hidden[rows])
        return d_hidden, d_weight.result() if d_weight else None, None, None, None


class _Softmax:
    """Statistics of a chunk's logits, and the logits' gradient in their place. Row arguments are of the whole [R]; `rows` says which."""

    def __init__(self, head: Head, size: int, targets: Tensor):
        start = head.rank * size
        self.columns = targets - start  # [R] in this rank's logits; outside of them for other ranks' tokens
        self.width = min(max(head.vocab_size - start, 0), size)  # columns that are real tokens
        self.temperature = head.temperature or 1.0
        self.fused = head.fused

    def sums(self, logits: Tensor, rows: slice, peak: Tensor, sums: Tensor) -> None:
        """Sets peak: the largest x, and sums [3, R]: sum exp(x - peak), sum x exp(x - peak), x[target] (0 if it is elsewhere)."""
        arguments = (logits, self.columns[rows], self.width, self.temperature, peak[rows], sums[:, rows])
        if self.fused:
            from megaflow.actor import kernels

            return kernels.softmax_sums(*arguments)
        return _plain_sums(*arguments)

    def gradient(self, logits, rows: slice, lse, entropy, grad_logp, grad_entropy) -> None:
        per_row = [None if t is None else t[rows] for t in (lse, entropy, grad_logp, grad_entropy)]
        arguments = (logits, self.columns[rows], self.width, self.temperature, *per_row)
        if self.fused:
            from megaflow.actor import kernels

            return kernels.softmax_gradient(*arguments)
        return _plain_gradient(*arguments)


class WeightGradient:
    """Sums the parts of a weight's gradient that chunks of rows bring, in fp32."""

    def __init__(self, weight: Tensor):
        self.weight = weight
        self.into_main = hasattr(weight, "main_grad") and hasattr(weight, "grad_added_to_main_grad")
        self.total = weight.main_grad if self.into_main else torch.zeros_like(weight, dtype=torch.float32)

    def add(self, d_logits: Tensor, hidden: Tensor) -> None:
        """d_logits [r, V/tp], hidden [r, H]."""
        add_product(self.total, d_logits, hidden)

    def result(self) -> Tensor:
        """What autograd gets. After main_grad has been added to: a placeholder, since the wrapper's hook must find a gradient.

        It adds that to main_grad again only for tied embeddings (`zero_out_wgrad`), whose other half comes through autograd: hence zeros.
        """
        if not self.into_main:
            return self.total.to(self.weight.dtype)
        self.weight.grad_added_to_main_grad = True
        make = torch.zeros_like if getattr(self.weight, "zero_out_wgrad", False) else torch.empty_like
        return make(self.weight, requires_grad=False)


def _combine(peak: Tensor, sums: Tensor, group: dist.ProcessGroup | None) -> tuple[Tensor, Tensor, Tensor]:
    """One rank's sums to logp, logarithm of the sum of exponentials, entropy; all [R]. Two collectives, whatever the number of chunks."""
    if group is not None and dist.get_world_size(group) > 1:
        local_peak = peak.clone()
        dist.all_reduce(peak, dist.ReduceOp.MAX, group=group)
        sums[:2] *= (local_peak - peak).exp()
        dist.all_reduce(sums, group=group)
    mass, weighted, target_logit = sums
    lse = peak + mass.log()
    return target_logit - lse, lse, lse - weighted / mass


def _row_chunks(size: int, row_bytes: int) -> list[slice]:
    """Slices of 0..size of nearly the same length, a multiple of 128 where there are several: even tiles for the matrix products."""
    number = max(1, -(-size * row_bytes // CHUNK_BYTES))
    step = -(-size // number)
    step = step if number == 1 or step < 128 else -(-step // 128) * 128
    return [slice(i, min(i + step, size)) for i in range(0, size, max(1, step))]


def _plain_sums(logits: Tensor, columns: Tensor, width: int, temperature: float, peak: Tensor, sums: Tensor) -> None:
    if width == 0:
        peak.fill_(-1e30)  # finite, so that a rank of padding alone adds 0 and not NaN
        sums.zero_()
        return
    for rows in _elementwise_chunks(len(columns), width):
        x = logits[rows, :width].float() / temperature
        peak[rows] = x.amax(-1)
        e = (x - peak[rows, None]).exp()
        sums[0, rows] = e.sum(-1)
        sums[1, rows] = (e * x).sum(-1)
        column, mine = _mine(columns[rows], width)
        sums[2, rows] = torch.where(mine, x.gather(1, column)[:, 0], 0.0)


def _plain_gradient(logits, columns, width: int, temperature: float, lse, entropy, grad_logp, grad_entropy) -> None:
    logits[:, width:] = 0
    if width == 0:
        return
    for rows in _elementwise_chunks(len(columns), width):
        x = logits[rows, :width].float() / temperature - lse[rows, None]  # log p
        p = x.exp()
        # d logp / d x_j = [j is target] - p_j;   d entropy / d x_j = -p_j (log p_j + entropy)
        grad = p * -grad_logp[rows, None]
        if grad_entropy is not None:
            grad -= grad_entropy[rows, None] * p * (x + entropy[rows, None])
        column, mine = _mine(columns[rows], width)
        grad.scatter_add_(1, column, torch.where(mine, grad_logp[rows], 0.0)[:, None])
        logits[rows, :width] = (grad / temperature).to(logits.dtype)


def _mine(columns: Tensor, width: int) -> tuple[Tensor, Tensor]:
    """(column to read [r, 1], whether the token is this rank's [r])."""
    return columns.clamp(0, width - 1)[:, None], (columns >= 0) & (columns < width)


def _elementwise_chunks(size: int, width: int) -> list[slice]:
    step = max(1, CHUNK_ELEMENTS // max(1, width))
    return [slice(i, min(i + step, size)) for i in range(0, size, step)]
