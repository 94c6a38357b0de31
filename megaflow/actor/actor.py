"""The Megatron engine: log-probabilities, updates, sleep and wake. Every public method is collective."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.pipeline_parallel import get_forward_backward_func
from torch import Tensor

from megaflow.actor import optimizer as optim
from megaflow.actor.logprob import logp_and_entropy
from megaflow.actor.memory import HostCopy, Sleeper
from megaflow.actor.model import build_model, global_parameters
from megaflow.actor.packing import MicroBatch, make_micro_batch
from megaflow.actor.update import LossOfMicroBatch, mini_batches
from megaflow.config.schema import Config
from megaflow.data.packing import pack_micro_batches
from megaflow.parallel import device
from megaflow.parallel.mesh import Mesh
from megaflow.shape import ModelShape
from megaflow.types import DivergedError, Sample, Stats

Objective = Callable[..., tuple[Tensor, dict[str, Tensor]]]


class Actor:
    """The policy on this rank.

    parameters   global Megatron name -> this rank's shard (live)
    """

    def __init__(self, shape: ModelShape, config: Config, mesh: Mesh, total_optimizer_steps: int):
        """Collective. Weights are not set: load them into `parameters`, then call `weights_changed`."""
        self.shape, self.config, self.mesh = shape, config.actor, mesh
        self.algo = config.algo
        self.temperature = config.sampling.temperature
        self.device = device.device()
        self.multiple = config.parallel.tp if config.parallel.sp else 1
        model = build_model(shape, config, mesh, self.device)
        self.model = optim.wrap_for_training(model, config.actor)
        self.optimizer, self.scheduler = optim.make_optimizer(self.model, config.actor, total_optimizer_steps)
        self.parameters: dict[str, Tensor] = global_parameters(self.model)
        self.sleeper = Sleeper(self.model, self.optimizer, config.actor.offload)
        self.skipped_in_a_row = 0

    def weights_changed(self) -> None:
        """The parameters were written from outside: the optimizer's fp32 main copy follows."""
        self.optimizer.reload_model_params()

    def host_copy(self) -> HostCopy:
        """A copy of the present weights in host memory, e.g. the reference model's."""
        return HostCopy(self.parameters)

    # --- forward only ---------------------------------------------------------------------------------------------

    def logprobs(self, samples: list[Sample]) -> list[Tensor]:
        """Collective. Log-probability of each response token, [R_i] fp32 on the host, on every rank of the replica."""
        micro_batches = self._micro_batches(samples)
        self.model.eval()
        with torch.no_grad():
            found = self._run(micro_batches, lambda mb: functools.partial(_keep_logp, mb), forward_only=True)
        self.model.train()
        return self._in_order(samples, micro_batches, found)

    def logprobs_of(self, weights: HostCopy, samples: list[Sample]) -> list[Tensor]:
        """Collective. The same under other weights, which take the place of the policy's for the time of the call."""
        with weights.swapped_in(self.parameters):
            return self.logprobs(samples)

    def _in_order(self, samples: list[Sample], micro_batches: list[MicroBatch], found: list[Tensor]) -> list[Tensor]:
        """Only the last stage has the results; all stages need them, since every rank of a replica holds the same samples."""
        box: list[Any] = [None]
        if self.mesh.pp.is_last:
            box[0] = [lp.split(mb.response_lengths) for mb, lp in zip(micro_batches, found, strict=True)]
        if self.mesh.pp.size > 1:
            dist.broadcast_object_list(box, src=self.mesh.pp.ranks[-1], group=self.mesh.pp.group)
        by_sample = {id(s): lp for mb, lps in zip(micro_batches, box[0], strict=True) for s, lp in zip(mb.samples, lps, strict=True)}
        return [by_sample[id(s)].clone() for s in samples]

    # --- training ---------------------------------------------------------------------------------------------------

    def update(self, samples: list[Sample], objective: Objective, algo: Any) -> Stats:
        """Collective. `actor.epochs` passes over the samples, one optimizer step for each mini batch.

        objective(logp [R], entropy [R], inputs, algo) -> (per-token loss [R], stats of [R]); masking, weights and sums are done here.
        Raises DivergedError after `actor.max_skipped` steps in a row with non-finite gradients.
        """
        totals: dict[str, float] = {}
        steps = skipped = 0
        for _ in range(self.config.epochs):
            for mini_batch in mini_batches(self.mesh, samples):
                stats, ok = self._optimizer_step(mini_batch, objective, algo)
                steps, skipped = steps + 1, skipped + (not ok)
                for name, value in stats.items():
                    totals[name] = totals.get(name, 0.0) + value
        means = {name: value / max(steps, 1) for name, value in totals.items()}
        return {**means, "train/skipped": float(skipped), "train/optimizer_steps": float(steps)}

    def _optimizer_step(self, mini_batch, objective: Objective, algo: Any) -> tuple[Stats, bool]:
        self.model.zero_grad_buffer()
        self.optimizer.zero_grad()
        micro_batches = self._micro_batches(mini_batch.samples)
        make_loss = functools.partial(LossOfMicroBatch, mini_batch=mini_batch, objective=objective, algo=algo, device=self.device)
        results = self._run(micro_batches, make_loss, forward_only=False)
        stats = self._sum_over_ranks(results)
        ok, norm = optim.guarded_step(self.optimizer)
        stats["train/lr"] = float(self.optimizer.param_groups[0]["lr"])
        stats["train/grad_norm"] = norm
        if ok:
            self.scheduler.step(increment=1)
        self._count_skipped(ok, norm)
        return stats, ok

    def _count_skipped(self, ok: bool, norm: float) -> None:
        self.skipped_in_a_row = 0 if ok else self.skipped_in_a_row + 1
        if self.skipped_in_a_row >= self.config.max_skipped:
            raise DivergedError(
                f"{self.skipped_in_a_row} optimizer steps in a row had a gradient norm of {norm}; the last checkpoint is untouched. "
                "Lower actor.lr, lower algo.clip.high, or resume from an earlier checkpoint (run.resume=PATH)"
            )

    def _sum_over_ranks(self, results: list[dict[str, float]]) -> Stats:
        """Sums of a mini batch: over its micro batches and the data-parallel ranks on the last stage, then told to the other stages."""
        box: list[Any] = [None]
        if self.mesh.pp.is_last:
            names = results[0].keys()
            box[0] = self.mesh.sum({n: sum(float(r[n]) for r in results) for n in names})
        if self.mesh.pp.size > 1:
            dist.broadcast_object_list(box, src=self.mesh.pp.ranks[-1], group=self.mesh.pp.group)
        return box[0]

    # --- the common part ----------------------------------------------------------------------------------------------

    def _micro_batches(self, samples: list[Sample]) -> list[MicroBatch]:
        """Packs of at most `micro_batch_tokens`; as many on every data-parallel rank, so that no rank waits for another's last one."""
        lengths = [s.num_tokens for s in samples]
        wanted = len(pack_micro_batches(lengths, self.config.micro_batch_tokens)) if lengths else 1
        most = torch.tensor([wanted], device=self.device)
        dist.all_reduce(most, dist.ReduceOp.MAX, group=self.mesh.dp.group)
        packs = pack_micro_batches(lengths, self.config.micro_batch_tokens, min_bins=int(most))
        return [make_micro_batch([samples[i] for i in pack], self.device, self.multiple) for pack in packs]

    def _run(self, micro_batches: list[MicroBatch], make_loss: Callable[[MicroBatch], Callable], forward_only: bool) -> list[Any]:
        """One pass of Megatron's schedule; what the loss functions kept, in order (empty except on the last stage)."""

        def forward_step(data: Iterator[MicroBatch], model):
            micro_batch = next(data)
            output = model(
                micro_batch.tokens,
                micro_batch.packed.positions[None],
                None,
                packed_seq_params=micro_batch.packed,
                output_processor=self._head,
                output_processor_context=micro_batch,
            )
            return output, make_loss(micro_batch)

        return get_forward_backward_func()(
            forward_step_func=forward_step,
            data_iterator=iter(micro_batches),
            model=self.model,
            num_microbatches=len(micro_batches),
            seq_length=max(mb.num_tokens for mb in micro_batches),
            micro_batch_size=1,
            forward_only=forward_only,
        )

    def _head(self, hidden_states: Tensor, output_layer, output_weight, context: MicroBatch, config, **_) -> Tensor:
        """hidden [T, 1, H] (megatron) -> [2, R] fp32: log-probability of each target, entropy. Only predicting rows get logits."""
        rows = context.rows
        if not config.sequence_parallel:
            hidden_states = hidden_states.index_select(0, rows)
        logits, _ = output_layer(hidden_states, weight=output_weight, runtime_gather_output=False)  # [R, 1, V/tp]
        logits = logits.squeeze(1)
        if config.sequence_parallel:
            logits = logits.index_select(0, rows)
        logp, entropy = logp_and_entropy(
            logits,
            context.targets,
            vocab_size=self.shape.vocab_size,
            temperature=self.temperature,
            rank=self.mesh.tp.index,
            group=self.mesh.tp.group,
        )
        return torch.stack([logp, entropy])

    # --- sleep and wake -------------------------------------------------------------------------------------------------

    def sleep(self) -> None:
        """Collective. Gradients are freed; the rest moves to host memory as `actor.offload` says. Weights are live until then."""
        self.sleeper.sleep()

    def wake(self) -> None:
        """Collective. Undo `sleep`."""
        self.sleeper.wake()

    @contextlib.contextmanager
    def awake(self):
        """For the time of the block."""
        self.wake()
        try:
            yield self
        finally:
            self.sleep()


def _keep_logp(micro_batch: MicroBatch, output: Tensor):
    """A loss function for Megatron's schedule that keeps the log-probabilities and asks for nothing else."""
    logp = output[0].detach().to("cpu", copy=True)
    return output.sum() * 0.0, torch.ones((), dtype=torch.int), logp


