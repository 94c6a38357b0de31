"""A reward model on the mesh: Megatron's forward with a scalar head, no gradients, no optimizer. Every public method is collective."""

from __future__ import annotations

import contextlib
import dataclasses

import torch
from torch import Tensor

from megaflow.actor.critic import keep
from megaflow.actor.engine import Engine
from megaflow.actor.memory import HostCopy
from megaflow.actor.packing import MicroBatch
from megaflow.config.schema import Config
from megaflow.data.packing import split_balanced
from megaflow.parallel import device
from megaflow.parallel.mesh import Mesh
from megaflow.shape import ModelShape
from megaflow.types import Sample


class RewardModel(Engine):
    """Fill `parameters`, then call `weights_loaded`; it is asleep from then on, but within `awake()`."""

    head = "scalar"

    def __init__(self, shape: ModelShape, config: Config, mesh: Mesh):
        """Collective. Weights are not set."""
        tokens = config.reward.model.micro_batch_tokens or config.actor.micro_batch_tokens
        super().__init__(shape, config, mesh, dataclasses.replace(config.actor, micro_batch_tokens=tokens, recompute="none"))
        self._asleep: HostCopy | None = None

    def weights_loaded(self) -> None:
        """On CUDA the weights move to host memory, where they stay for good: waking copies them, sleeping only frees."""
        if device.on_cuda():
            self._asleep = self.host_copy()
            self._free()

    def share(self, samples: list[Sample]) -> list[Sample]:
        """Collective. What this rank's replica is to score of all ranks' samples."""
        return self.mesh.scatter(samples, split_balanced)

    @contextlib.contextmanager
    def awake(self):
        """For the time of the block."""
        self._fill()
        try:
            yield self
        finally:
            self._free()

    def scores(self, samples: list[Sample]) -> list[float]:
        """Collective. The score at the last token of prompt and response, on every rank of the replica."""
        whole = [dataclasses.replace(s.prompt, tokens=[*s.prompt.tokens, *s.response.tolist()]) for s in samples]
        asked = [dataclasses.replace(s, prompt=p, response=s.response.new_zeros(1)) for s, p in zip(samples, whole, strict=True)]
        return [float(row) for row in self._forward(asked, lambda mb: keep)]  # "before" a token that follows: at the last one

    @torch.no_grad()
    def _fill(self) -> None:
        if self._asleep is not None:
            for name, p in self.parameters.items():
                p.untyped_storage().resize_(p.numel() * p.element_size())
                p.copy_(self._asleep.tensors[name], non_blocking=True)

    def _free(self) -> None:
        if self._asleep is not None:
            device.synchronize()
            for p in self.parameters.values():
                p.untyped_storage().resize_(0)
            device.release_cached_memory()

    def _head(self, hidden_states: Tensor, output_layer, context: MicroBatch, **_) -> Tensor:
        """hidden [T, 1, H] (megatron) -> scores [R] fp32, one for each sequence."""
        return output_layer(hidden_states)[context.rows]
