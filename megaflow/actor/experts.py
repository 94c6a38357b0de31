"""All experts of a rank in one matrix product each way, without Transformer Engine: torch's grouped product over Megatron's own weights."""

from __future__ import annotations

import functools
import itertools
import logging
from collections.abc import Iterator, Sequence

import torch
import torch.nn.functional as F
from megatron.core.transformer.moe.experts import SequentialMLP
from torch import Tensor

from megaflow.parallel.device import device, on_cuda
from megaflow.shape import ModelShape
from megaflow.types import ConfigError

log = logging.getLogger(__name__)
ALIGNMENT = 16  # bytes, of every row: the kernel reads and writes by TMA
HOPPER = 9  # compute capability from which torch 2.11 has the kernel; before, `grouped_mm` is a loop that asks the device for the counts


def use_grouped(choice: str, shape: ModelShape, etp: int, dtype: torch.dtype) -> bool:
    """choice: `model.experts`. auto: grouped on a Hopper GPU or later in bf16; the log says once what was taken.

    Raises ConfigError when grouped is asked for and the sizes do not allow it.
    """
    if shape.experts is None:
        return False
    rows = {"hidden size": shape.hidden_size, "expert's size": shape.experts.ffn_size // etp}
    odd = [f"{name} {size}" for name, size in rows.items() if size * dtype.itemsize % ALIGNMENT]
    if choice == "grouped" and odd:
        raise ConfigError(f"model.experts=grouped needs rows of a multiple of {ALIGNMENT} bytes, and {odd[0]} is not; use sequential")
    has_kernel = on_cuda() and dtype == torch.bfloat16 and torch.cuda.get_device_capability(device())[0] >= HOPPER
    grouped = choice == "grouped" or (choice == "auto" and has_kernel and not odd)
    _say_once(grouped)
    return grouped


@functools.cache
def _say_once(grouped: bool) -> None:
    log.info("experts: %s", "grouped, one product for all of a rank" if grouped else "one after another")


class GroupedExperts(SequentialMLP):
    """Megatron's SequentialMLP with its parameters, their names and its checkpoints; only the forward pass is one of groups.

    The product wants the weights of all experts as one tensor [E, out, in]. They are never copied into one: the first weights of all
    experts lie at a constant distance from each other in memory, and so do the second ones, so that strides describe them. That holds from
    the start, and where the distributed optimizer moves the parameters into its buffer: it goes from the model's last parameter to its
    first, which is why the experts are registered in that order. The fp32 gradients lie in the same way and take one addition.
    """

    def __init__(self, num_local_experts: int, *args, **kwargs):
        super().__init__(num_local_experts, *args, **kwargs)
        experts = list(self.local_experts)
        for weights in ([e.linear_fc1.weight for e in experts], [e.linear_fc2.weight for e in experts]):
            for w, place in zip(weights, torch.stack([w.data for w in weights]), strict=True):
                w.data = place
        self.local_experts = LastFirst(experts)

    def forward(self, permuted_local_hidden_states: Tensor, tokens_per_expert: Tensor, permuted_probs: Tensor) -> tuple[Tensor, None]:
        """[n, H] rows sorted by expert, [E] rows of each, [n] weight of each row -> [n, H], no bias. Megatron's names."""
        if self.num_local_experts == 1:
            return super().forward(permuted_local_hidden_states, tokens_per_expert, permuted_probs)
        x = permuted_local_hidden_states
        ends = tokens_per_expert.cumsum(0).to(device=x.device, dtype=torch.int32, non_blocking=True)
        first, second = ([getattr(e, layer).weight for e in self.local_experts] for layer in ("linear_fc1", "linear_fc2"))
        hidden = self.local_experts[0].activation_func(GroupedLinear.apply(x, ends, *first))  # [n, F]
        hidden = (hidden * permuted_probs.unsqueeze(-1)).to(hidden.dtype)
        return GroupedLinear.apply(hidden, ends, *second), None


class LastFirst(torch.nn.ModuleList):
    """Registers its modules from the last to the first; numbers and iteration are as ever."""

    def __init__(self, modules: Sequence[torch.nn.Module]):
        super().__init__()
        for i in reversed(range(len(modules))):
            self.add_module(str(i), modules[i])

    def __iter__(self) -> Iterator[torch.nn.Module]:
        return (self[i] for i in range(len(self)))


class GroupedLinear(torch.autograd.Function):
    """x [n, in], ends [E] int32 (where the rows of each expert end), E weights [out, in] -> [n, out].

    Weight gradients are products in x's dtype. Where Megatron keeps fp32 sums they are added there at once, and its hooks are told so.
    """

    @staticmethod
    def forward(ctx, x: Tensor, ends: Tensor, *weights: Tensor) -> Tensor:
        ctx.save_for_backward(x, ends, *weights)
        return _product(x, as_one(weights).transpose(1, 2), ends)

    @staticmethod
    def backward(ctx, grad: Tensor):
        x, ends, *weights = ctx.saved_tensors
        grad = grad.contiguous()
        dx = _product(grad, as_one(weights), ends) if ctx.needs_input_grad[0] else None
        trained = any(ctx.needs_input_grad[2:])
        return dx, None, *(_weight_gradients(grad, x, ends, weights) if trained else [None] * len(weights))


def _product(rows: Tensor, matrices: Tensor, ends: Tensor) -> Tensor:
    """[n, a], [E, a, b] -> [n, b]."""
    if not len(rows):
        return rows.new_empty(0, matrices.shape[2])
    return F.grouped_mm(rows, matrices, offs=ends)


def _weight_gradients(grad: Tensor, x: Tensor, ends: Tensor, weights: Sequence[Tensor]) -> Sequence[Tensor]:
    """The gradients; where they have been added to `main_grad`, tensors of their shape whose values nobody reads."""
    if not len(x):
        gradients = x.new_zeros(len(weights), *weights[0].shape)
    else:
        gradients = F.grouped_mm(grad.t(), x, offs=ends)  # [E, out, in]; an expert without rows gets zeros
    if any(getattr(w, "main_grad", None) is None for w in weights):
        return gradients.unbind(0)
    totals = [w.main_grad for w in weights]
    if (together := _strided(totals)) is not None:
        together.add_(gradients)
    else:
        for total, part in zip(totals, gradients, strict=True):
            total.add_(part)
    for w in weights:
        w.grad_added_to_main_grad = True
    return gradients.unbind(0)


def as_one(tensors: Sequence[Tensor]) -> Tensor:
    """[E, ...] the tensors themselves where they lie at equal distances; else a copy."""
    together = _strided(tensors)
    return torch.stack([t.detach() for t in tensors]) if together is None else together


def _strided(tensors: Sequence[Tensor]) -> Tensor | None:
    """[E, ...] a view; None where there is none: a bucket of the optimizer may end, padded, between two experts."""
    first = tensors[0].detach()
    places = [t.data_ptr() for t in tensors]
    steps = {b - a for a, b in itertools.pairwise(places)}
    step, *others = steps
    storage = first.untyped_storage()
    inside = places[-1] + first.nbytes <= storage.data_ptr() + storage.nbytes()
    if others or step < first.nbytes or step % ALIGNMENT or not inside:
        return None
    return first.as_strided((len(tensors), *first.shape), (step // first.element_size(), *first.stride()))
