"""The parts of a model that this rank holds: one, or `parallel.vpp` of them, which take turns with those of the other stages."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


class Chunks(list[torch.nn.Module]):
    """Earlier layers first. A list, since Megatron's schedules and optimizer want one; what is done to a model is done to each."""

    @property
    def config(self) -> Any:
        return self[0].config

    @property
    def grad_buffers(self) -> list[Any]:
        """Megatron's buffers of parameters and gradients, once wrapped for training: of the dense part, then of the experts."""
        return [buffer for chunk in self for buffer in (*chunk.buffers, *chunk.expert_parallel_buffers)]

    def map(self, wrap: Callable[[torch.nn.Module], torch.nn.Module]) -> Chunks:
        return Chunks(wrap(chunk) for chunk in self)

    def train(self, mode: bool = True) -> None:
        for chunk in self:
            chunk.train(mode)

    def zero_grad_buffer(self) -> None:
        for chunk in self:
            chunk.zero_grad_buffer()

    def offload_grad_buffers(self) -> None:
        for chunk in self:
            chunk.offload_grad_buffers()

    def restore_grad_buffers(self) -> None:
        for chunk in self:
            chunk.restore_grad_buffers()

    def unwrapped(self) -> list[torch.nn.Module]:
        """GPTModels, without what wraps them."""
        return [unwrap(chunk) for chunk in self]


def unwrap(model: torch.nn.Module) -> torch.nn.Module:
    while hasattr(model, "module"):
        model = model.module
    return model
