"""The experts that transformers' routers choose while they generate."""

from __future__ import annotations

import dataclasses
import functools

import torch
from torch import Tensor

from megaflow.rollout.routes import compact
from megaflow.shape import ModelShape
from megaflow.types import Sample


class RouteRecorder:
    """For the time of the block; of the calls of one group of samples, whose sequences begin with the same prompt.

    A block of experts is called with (tokens, the experts of each, their weights), in every family that has them.
    """

    def __init__(self, model: torch.nn.Module, shape: ModelShape):
        assert shape.experts is not None, f"{shape.family} has no experts"
        self.experts, self.model = shape.experts, model
        self.calls: list[list[Tensor]] = [[] for _ in shape.experts.layers]  # by layer: [n * tokens of the call, K]
        self.handles: list[torch.utils.hooks.RemovableHandle] = []

    def __enter__(self) -> RouteRecorder:
        for number, is_sparse in enumerate(self.experts.layers):
            if is_sparse:
                block = self.model.model.layers[number].mlp.experts
                self.handles.append(block.register_forward_pre_hook(functools.partial(self._record, number)))
        return self

    def _record(self, number: int, block: torch.nn.Module, inputs: tuple) -> None:
        self.calls[number].append(inputs[1].cpu())

    def __exit__(self, *_: object) -> None:
        for handle in self.handles:
            handle.remove()

    def filled(self, samples: list[Sample]) -> list[Sample]:
        """The group with its routes; all samples of it were fed together, each until the longest was done."""
        layers = [self._layer(calls, len(samples)) for calls in self.calls]
        missing = torch.full_like(next(each for each in layers if each is not None), -1)
        whole = torch.stack([missing if each is None else each for each in layers], 2).numpy()  # [n, tokens fed, L, K]
        routes = [compact(row[: s.num_tokens - 1], self.experts, s.num_tokens) for s, row in zip(samples, whole, strict=True)]
        return [dataclasses.replace(s, routes=torch.from_numpy(r)) for s, r in zip(samples, routes, strict=True)]

    def _layer(self, calls: list[Tensor], num_samples: int) -> Tensor | None:
        return torch.cat([call.view(num_samples, -1, self.experts.top_k) for call in calls], 1) if calls else None
