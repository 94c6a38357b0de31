"""Log-probabilities and entropy from vocabulary-parallel logits, without a second tensor of their size."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

CHUNK_ELEMENTS = 1 << 24  # fp32 elements that are live at once: 64 MiB


def logp_and_entropy(
    logits: Tensor, targets: Tensor, *, vocab_size: int, temperature: float = 1.0, rank: int = 0, group: dist.ProcessGroup | None = None
) -> tuple[Tensor, Tensor]:
    """Of the softmax of logits / temperature over the first `vocab_size` columns.

    logits [R, V/tp], any float dtype: this rank's columns, `rank * V/tp` onward. The backward pass overwrites them with their gradient,
    so nothing else may read them afterwards.  targets [R] int64.  Returns logp [R] and entropy [R], fp32.
    """
    if temperature == 0:
        temperature = 1.0  # greedy decoding: the distribution is that of the plain logits
    return _VocabParallel.apply(logits, targets, vocab_size, temperature, rank, group)


class _VocabParallel(torch.autograd.Function):
    @staticmethod
    def forward(ctx, logits, targets, vocab_size, temperature, rank, group):
        start = rank * logits.shape[1]
        width = min(max(vocab_size - start, 0), logits.shape[1])  # columns that are real tokens
        peak, partial = _local_softmax_sums(logits[:, :width], targets - start, temperature)
        if group is not None and dist.get_world_size(group) > 1:
            local_peak = peak.clone()
            dist.all_reduce(peak, dist.ReduceOp.MAX, group=group)
            partial[:2] *= (local_peak - peak).exp()
            dist.all_reduce(partial, group=group)
        mass, weighted, target_logit = partial  # sum exp(x - peak), sum x exp(x - peak), x[target]
        lse = peak + mass.log()
        logp, entropy = target_logit - lse, lse - weighted / mass
        ctx.save_for_backward(logits, targets, lse, entropy)
        ctx.start, ctx.width, ctx.temperature = start, width, temperature
        ctx.set_materialize_grads(False)
        return logp, entropy

    @staticmethod
    def backward(ctx, grad_logp, grad_entropy):
        logits, targets, lse, entropy = ctx.saved_tensors
        if grad_logp is None and grad_entropy is None:
            return (None,) * 6
        grad_logp = torch.zeros_like(lse) if grad_logp is None else grad_logp
        logits[:, ctx.width :] = 0
        for rows in _chunks(*logits.shape):
            x = logits[rows, : ctx.width].float() / ctx.temperature - lse[rows, None]  # log p
            p = x.exp()
            # d logp / d x_j = [j is target] - p_j;   d entropy / d x_j = -p_j (log p_j + entropy)
            grad = p * -grad_logp[rows, None]
            if grad_entropy is not None:
                grad -= grad_entropy[rows, None] * p * (x + entropy[rows, None])
            column = targets[rows] - ctx.start
            mine = (column >= 0) & (column < ctx.width)
            grad[mine.nonzero()[:, 0], column[mine]] += grad_logp[rows][mine]
            logits[rows, : ctx.width] = (grad / ctx.temperature).to(logits.dtype)
        return logits, None, None, None, None, None


def _local_softmax_sums(logits: Tensor, columns: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    """This rank's real columns: the largest x [R], and [3, R]: sum exp(x - peak), sum x exp(x - peak), x[target] (0 if it is elsewhere)."""
    size, width = logits.shape
    peak = torch.full((size,), -1e30, device=logits.device)  # finite, so that a rank of padding alone adds 0 and not NaN
    partial = torch.zeros(3, size, device=logits.device)
    if width == 0:
        return peak, partial
    for rows in _chunks(size, width):
        x = logits[rows].float() / temperature
        peak[rows] = x.amax(-1)
        e = (x - peak[rows, None]).exp()
        partial[0, rows] = e.sum(-1)
        partial[1, rows] = (e * x).sum(-1)
        column = columns[rows]
        mine = (column >= 0) & (column < width)
        partial[2, rows] = torch.where(mine, x.gather(1, column.clamp(0, width - 1)[:, None])[:, 0], 0.0)
    return peak, partial


def _chunks(size: int, width: int):
    step = max(1, CHUNK_ELEMENTS // max(1, width))
    return [slice(i, min(i + step, size)) for i in range(0, size, step)]
