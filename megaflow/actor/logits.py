"""Whole logits of a sequence, [T, V], as the Megatron model computes them: to compare models by, never in training."""

from __future__ import annotations

import torch
from torch import Tensor

from megaflow.actor.engine import Engine
from megaflow.actor.packing import MicroBatch
from megaflow.config.schema import Config
from megaflow.parallel.mesh import Mesh
from megaflow.shape import ModelShape
from megaflow.types import Prompt, Sample


class LogitsEngine(Engine):
    """A policy on one tensor-parallel rank."""

    def __init__(self, shape: ModelShape, config: Config, mesh: Mesh):
        """Collective. Weights are not set: load them into `parameters`."""
        assert mesh.tp.size == 1, "the vocabulary is not gathered"
        super().__init__(shape, config, mesh, config.actor)

    def logits_of(self, tokens: list[int]) -> Tensor:
        """Collective. [T, V] fp32 on the host."""
        after_all = torch.tensor([*tokens[1:], tokens[0]])  # the last one is read by nobody: it makes the last position a predicting one
        sample = Sample(Prompt("", tokens[:1], ""), 0, 0, after_all, None, "stop", 0)
        return self._forward([sample], lambda mb: _keep)[0]

    def _head(self, hidden_states: Tensor, output_layer, output_weight, context: MicroBatch, config, **_) -> Tensor:
        """hidden [T, 1, H] (megatron) -> [R, V] fp32."""
        weight = output_layer.weight if output_weight is None else output_weight
        return (hidden_states[:, 0].index_select(0, context.rows) @ weight.t())[:, : self.shape.vocab_size].float()


def _keep(output: Tensor):
    """A loss function for Megatron's schedule that keeps the logits and asks for nothing else."""
    return output.sum() * 0.0, torch.ones((), dtype=torch.int), output.detach()
