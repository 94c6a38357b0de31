"""The critic: what reward it expects before each token, and how it learns from what came. Every public method is collective."""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from megaflow.actor.engine import TrainedEngine
from megaflow.actor.packing import MicroBatch
from megaflow.actor.transfer import to_device
from megaflow.actor.update import MiniBatch
from megaflow.config.schema import ActorConfig, Config
from megaflow.parallel.mesh import Mesh
from megaflow.shape import ModelShape
from megaflow.types import Sample, Stats


class Critic(TrainedEngine):
    """A Megatron model with a scalar head, on the actor's mesh, with an optimizer of its own.

    parameters   global Megatron name -> this rank's shard (live); `output_layer.weight` and `.bias` are the head
    """

    head = "scalar"
    section = ("critic", "critic")

    def __init__(self, shape: ModelShape, config: Config, mesh: Mesh, total_optimizer_steps: int):
        """Collective. Weights are not set: load them into `parameters`, then call `weights_changed`. The head starts at 0."""
        self.clip_value = config.critic.clip_value
        super().__init__(shape, config, mesh, settings_of(config), total_optimizer_steps)

    def values(self, samples: list[Sample]) -> tuple[list[Tensor], list[float]]:
        """Collective. The value before each response token, [R_i] fp32 on the host, and the one after the last, for each sample."""
        found = self._forward([with_one_more(s) for s in samples], lambda mb: keep)
        return [v[:-1].clone() for v in found], [float(v[-1]) for v in found]

    def update(self, samples: list[Sample]) -> Stats:
        """Collective. `critic.epochs` passes over the samples, which have `values` and `returns`; one optimizer step for each mini batch.

        Returns critic/*; raises DivergedError after `actor.max_skipped` steps in a row with non-finite gradients.
        """
        return self._update(samples, self._loss)

    def _loss(self, micro_batch: MicroBatch, mini_batch: MiniBatch):
        """For Megatron's schedule: values [R] -> (this pack's part of the loss, a count that nobody uses, metrics)."""
        samples = micro_batch.samples
        columns = ([s.values for s in samples], [s.returns for s in samples])
        old, returns = to_device([torch.cat([torch.zeros(0), *parts]) for parts in columns], self.device)  # [R]

        def of(output: Tensor) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
            per_token, clipped = value_loss(output, old, returns, self.clip_value)
            loss = per_token.sum() / mini_batch.total_tokens
            kept = {"critic/loss": loss.detach().clone(), "critic/clip_frac": clipped.float().sum() / mini_batch.total_tokens}
            return loss, torch.ones((), dtype=torch.int), kept  # cloned: the schedule divides the loss in place

        return of

    def _head(self, hidden_states: Tensor, output_layer, context: MicroBatch, **_) -> Tensor:
        """hidden [T, 1, H] (megatron) -> values [R] fp32, each before its response token."""
        return output_layer(hidden_states)[context.rows]


def settings_of(config: Config) -> ActorConfig:
    """The actor's settings with the critic's in their place."""
    own = {f.name: getattr(config.critic, f.name) for f in dataclasses.fields(config.critic)}
    own = {name: value for name, value in own.items() if hasattr(config.actor, name)}
    own["micro_batch_tokens"] = config.critic.micro_batch_tokens or config.actor.micro_batch_tokens
    return dataclasses.replace(config.actor, **own)


def value_loss(values: Tensor, old: Tensor, returns: Tensor, clip: float) -> tuple[Tensor, Tensor]:
    """Half the squared error, the larger one of the value and of the value kept within `clip` of the old one; clip 0: of the value alone.

    All [R] -> (per token [R], [R] bool where the clipped error decides and nothing is learnt). The counterpart of PPO's clip (Schulman et
    al. 2017, arXiv:1707.06347) that the authors' code has and the paper does not; Huang et al. 2022, "The 37 implementation details of
    PPO", detail 9; verl's cliprange_value.
    """
    error = (values - returns).square()
    if clip == 0:
        return 0.5 * error, torch.zeros_like(values, dtype=torch.bool)
    bounded = (old + (values - old).clamp(-clip, clip) - returns).square()
    return 0.5 * torch.maximum(error, bounded), bounded > error


def with_one_more(sample: Sample) -> Sample:
    """Its response with any token after it, so that there is a result "before" that token: after the true last one."""
    return dataclasses.replace(sample, response=torch.cat([sample.response, sample.response.new_zeros(1)]))


def keep(output: Tensor):
    """A loss function for Megatron's schedule that keeps the output and asks for nothing else."""
    return output.sum() * 0.0, torch.ones((), dtype=torch.int), output.detach()
