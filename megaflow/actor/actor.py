"""The policy: log-probabilities and updates. Every public method is collective."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from megaflow.actor.engine import TrainedEngine
from megaflow.actor.fused import use_fused
from megaflow.actor.logprob import Head, logp_and_entropy, response_rows
from megaflow.actor.memory import HostCopy
from megaflow.actor.packing import MicroBatch
from megaflow.actor.replay import Replays
from megaflow.actor.update import LossOfMicroBatch
from megaflow.config.schema import Config
from megaflow.parallel.mesh import Mesh
from megaflow.shape import ModelShape
from megaflow.types import Sample, Stats

Objective = Callable[..., tuple[Tensor, dict[str, Tensor]]]


class Actor(TrainedEngine):
    """The policy on this rank.

    parameters   global Megatron name -> this rank's shard (live)
    """

    def __init__(self, shape: ModelShape, config: Config, mesh: Mesh, total_optimizer_steps: int):
        """Collective. Weights are not set: load them into `parameters`, then call `weights_changed`."""
        self.algo = config.algo
        self.softmax = Head(
            vocab_size=shape.vocab_size,
            temperature=config.sampling.temperature,
            rank=mesh.tp.index,
            group=mesh.tp.group,
            entropy_gradient=config.algo.entropy > 0,
            keep_bytes=int(config.actor.logits_gb * 1e9),
            fused=use_fused(config.model.kernels),
        )
        super().__init__(shape, config, mesh, config.actor, total_optimizer_steps)
        if config.actor.router_replay != "none":
            self.replays = Replays(shape, self.model, mesh, self.device, config.actor.router_replay, config.parallel.sp)

    def logprobs(self, samples: list[Sample]) -> list[Tensor]:
        """Collective. Log-probability of each response token, [R_i] fp32 on the host, on every rank of the replica.

        With `actor.router_replay` it is counted how many of the samples' routes this model would have chosen; see `route_stats`.
        """
        with self.replays.counting() if self.replays is not None else contextlib.nullcontext():
            return self._forward(samples, lambda mb: _keep_logp)

    def logprobs_of(self, weights: HostCopy, samples: list[Sample]) -> list[Tensor]:
        """Collective. The same under other weights, for the time of the call; their routers choose for themselves."""
        with weights.swapped_in(self.parameters), self.free_routes():
            return self.logprobs(samples)

    def free_routes(self) -> contextlib.AbstractContextManager[None]:
        """For the time of the block each token goes where this model's routers send it, whatever its sample says."""
        return contextlib.nullcontext() if self.replays is None else self.replays.free()

    def route_stats(self) -> Stats:
        """Collective. moe/routes_differ of the `logprobs` since the last call; nothing without routes."""
        return {} if self.replays is None else self.replays.differ()

    def update(self, samples: list[Sample], objective: Objective, algo: Any) -> Stats:
        """Collective. `actor.epochs` passes over the samples, one optimizer step for each mini batch.

        objective(logp [R], entropy [R], inputs, algo) -> (per-token loss [R], stats of [R]); masking, weights and sums are done here.
        Raises DivergedError after `actor.max_skipped` steps in a row with non-finite gradients.
        """
        assert self.softmax.entropy_gradient or not algo.entropy, "the actor was made for algo.entropy=0"
        return self._update(samples, functools.partial(LossOfMicroBatch, objective=objective, algo=algo, device=self.device))

    def _head(self, hidden_states: Tensor, output_layer, output_weight, context: MicroBatch, config, **_) -> Tensor:
        """hidden [T, 1, H] (megatron) -> [2, R] fp32: log-probability of each target, entropy. Only predicting rows get logits."""
        hidden = response_rows(hidden_states, context.rows, config.sequence_parallel, self.mesh.tp.group)
        weight = output_layer.weight if output_weight is None else output_weight
        logp, entropy = logp_and_entropy(hidden, weight, context.targets, self.softmax)
        return torch.stack([logp, entropy])


def _keep_logp(output: Tensor):
    """A loss function for Megatron's schedule that keeps the log-probabilities and asks for nothing else."""
    return output.sum() * 0.0, torch.ones((), dtype=torch.int), output[0].detach()
