"""What any Megatron model on the mesh needs: build, forward, optimizer step, sleep and wake. Every public method is collective."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.pipeline_parallel import get_forward_backward_func
from torch import Tensor

from megaflow.actor import optimizer as optim
from megaflow.actor.context import whole_rows
from megaflow.actor.memory import Demand, HostCopy, Sleeper, choose_offload
from megaflow.actor.model import build_model, global_parameters
from megaflow.actor.packing import MicroBatch, make_micro_batch
from megaflow.actor.replay import Replays, with_routes
from megaflow.actor.transfer import to_host
from megaflow.actor.update import MiniBatch, mini_batches, sum_of_metrics
from megaflow.config.schema import ActorConfig, Config
from megaflow.data.cost import SequenceCost
from megaflow.data.packing import pack_micro_batches
from megaflow.monitor.progress import mark
from megaflow.parallel import device
from megaflow.parallel.mesh import Mesh
from megaflow.shape import ModelShape
from megaflow.types import DivergedError, Sample, Stats

LossOf = Callable[[MicroBatch], Callable]  # a micro batch -> what Megatron's schedule calls with the model's output


class Engine:
    """A Megatron model, forward only. A subclass says in `_head` what the last stage makes of the hidden states.

    parameters   global Megatron name -> this rank's shard (live)
    """

    head: str = "vocabulary"  # what `build_model` puts on the last stage: vocabulary or scalar

    def __init__(self, shape: ModelShape, config: Config, mesh: Mesh, settings: ActorConfig):
        """Collective. Weights are not set: load them into `parameters`. settings: `config.actor`, or this engine's variant of it."""
        self.shape, self.config, self.mesh = shape, settings, mesh
        self.device = device.device()
        self.cost = SequenceCost.of(shape)
        self.multiple = config.parallel.tp if config.parallel.sp else 1
        self.vpp = config.parallel.vpp
        self.model = build_model(shape, dataclasses.replace(config, actor=settings), mesh, self.device, self.head)
        self.parameters: dict[str, Tensor] = global_parameters(self.model)
        self.replays: Replays | None = None  # of a policy with actor.router_replay

    def host_copy(self) -> HostCopy:
        """A copy of the present weights in host memory, e.g. the reference model's."""
        return HostCopy(self.parameters)

    def _head(self, hidden_states: Tensor, output_layer, output_weight, context: MicroBatch, config, **_) -> Tensor:
        """hidden [T, 1, H] (megatron) -> this pack's results."""
        raise NotImplementedError

    def _whole_head(self, *args, context: MicroBatch, **kwargs) -> Tensor:
        """`_head`, then the rows that lie on other context-parallel ranks."""
        found = self._head(*args, context=context, **kwargs)
        if context.slots is None:
            return found
        return whole_rows(found, context.slots, sum(context.response_lengths), self.mesh.cp.group)

    def _forward(self, samples: list[Sample], keep: LossOf) -> list[Tensor]:
        """Collective. What `keep` holds of each sample, in the order of `samples`, on every rank of the replica."""
        micro_batches = self._micro_batches(samples)
        self.model.train(False)
        with torch.no_grad():
            found = self._run(micro_batches, keep, forward_only=True)
        self.model.train()
        return self._in_order(samples, micro_batches, found)

    def _in_order(self, samples: list[Sample], micro_batches: list[MicroBatch], found: list[Tensor]) -> list[Tensor]:
        """Only the last stage has the results; all stages need them, since every rank of a replica holds the same samples."""
        # clones: a view would take all packs' bytes with it when it is pickled for the other stages
        whole = self._from_last_stage([row.clone() for row in to_host(found)] if self.mesh.pp.is_last else None)
        parts = [row.split(mb.response_lengths) for mb, row in zip(micro_batches, whole, strict=True)]
        by_sample = {id(s): row for mb, rows in zip(micro_batches, parts, strict=True) for s, row in zip(mb.samples, rows, strict=True)}
        return [by_sample[id(s)].clone() for s in samples]

    def _from_last_stage(self, value: Any) -> Any:
        """Collective over pp. The last stage's picklable value."""
        if self.mesh.pp.size == 1:
            return value
        box = [value]
        dist.broadcast_object_list(box, src=self.mesh.pp.ranks[-1], group=self.mesh.pp.group)
        return box[0]

    def _micro_batches(self, samples: list[Sample]) -> list[MicroBatch]:
        """Packs of at most `micro_batch_tokens`; as many on every data-parallel rank, so that no rank waits for another's last one."""
        lengths = [s.num_tokens for s in samples]
        wanted = len(pack_micro_batches(lengths, self.config.micro_batch_tokens)) if lengths else 1
        most = torch.tensor([wanted], device=self.device)
        dist.all_reduce(most, dist.ReduceOp.MAX, group=self.mesh.dp.group)
        group = self.mesh.pp.size if self.vpp > 1 else 1  # stages that interleave chunks take micro batches in groups of pp
        packs = pack_micro_batches(lengths, self.config.micro_batch_tokens, -(-int(most) // group) * group, self.cost.of_length)
        cp = self.mesh.cp if self.mesh.cp.size > 1 else None
        made = [make_micro_batch([samples[i] for i in pack], self.device, self.multiple, cp) for pack in packs]
        return [with_routes(self.replays, mb) for mb in made]

    def _run(self, micro_batches: list[MicroBatch], make_loss: LossOf, forward_only: bool) -> list[Any]:
        """One pass of Megatron's schedule; what the loss functions kept, in order (empty except on the last stage)."""
        number = itertools.count(1)

        def forward_step(data: Iterator[MicroBatch], model):
            micro_batch = next(data)
            mark("micro-batch", next(number), len(micro_batches) * len(self.model))
            packed = micro_batch.packed if self.replays is None else self.replays.on_device(micro_batch.packed)
            output = model(
                micro_batch.tokens,
                packed.positions[None],
                None,
                packed_seq_params=packed,
                output_processor=self._whole_head,
                output_processor_context=micro_batch,
            )
            return output, make_loss(micro_batch)

        return get_forward_backward_func()(
            forward_step_func=forward_step,
            data_iterator=[iter(micro_batches) for _ in self.model],
            model=self.model,
            num_microbatches=len(micro_batches),
            seq_length=max(mb.num_tokens for mb in micro_batches),
            micro_batch_size=1,
            forward_only=forward_only,
        )


class TrainedEngine(Engine):
    """An engine with gradients and an optimizer.

    section   of the configuration and of the metrics: whose lr to lower, and the prefix of what `_update` returns
    """

    section: tuple[str, str] = ("actor", "train")

    def __init__(self, shape: ModelShape, config: Config, mesh: Mesh, settings: ActorConfig, total_optimizer_steps: int):
        """Collective. After loading weights into `parameters`, call `weights_changed`."""
        offload = choose_offload(settings.offload, Demand.of(shape, config, settings, mesh))
        super().__init__(shape, config, mesh, settings)
        self.model = optim.wrap_for_training(self.model, settings)
        self.optimizer, self.scheduler = optim.make_optimizer(self.model, settings, total_optimizer_steps)
        self.parameters = global_parameters(self.model)
        self.sleeper = Sleeper(self.model, self.optimizer, offload)
        self.skipped_in_a_row = 0

    def weights_changed(self) -> None:
        """The parameters were written from outside: the optimizer's fp32 main copy follows."""
        self.optimizer.reload_model_params()

    def _update(self, samples: list[Sample], loss_of: Callable[[MicroBatch, MiniBatch], Callable]) -> Stats:
        """Collective. `epochs` passes over the samples, one optimizer step for each mini batch.

        Raises DivergedError after `max_skipped` steps in a row with non-finite gradients.
        """
        totals: dict[str, float] = {}
        steps = skipped = 0
        for _ in range(self.config.epochs):
            for mini_batch in mini_batches(self.mesh, samples):
                stats, ok = self._optimizer_step(mini_batch, loss_of)
                steps, skipped = steps + 1, skipped + (not ok)
                for name, value in stats.items():
                    totals[name] = totals.get(name, 0.0) + value
        means = {name: value / max(steps, 1) for name, value in totals.items()}
        prefix = self.section[1]
        return {**means, f"{prefix}/skipped": float(skipped), f"{prefix}/optimizer_steps": float(steps)}

    def _optimizer_step(self, mini_batch: MiniBatch, loss_of: Callable[[MicroBatch, MiniBatch], Callable]) -> tuple[Stats, bool]:
        self.model.zero_grad_buffer()
        self.optimizer.zero_grad()
        results = self._run(self._micro_batches(mini_batch.samples), lambda mb: loss_of(mb, mini_batch), forward_only=False)
        stats = self._sum_over_ranks(results)
        mark("optimizer step")
        ok, norm = optim.guarded_step(self.optimizer)
        prefix = self.section[1]
        stats[f"{prefix}/lr"] = float(self.optimizer.param_groups[0]["lr"])
        stats[f"{prefix}/grad_norm"] = norm
        if ok:
            self.scheduler.step(increment=1)
        self._count_skipped(ok, norm)
        return stats, ok

    def _count_skipped(self, ok: bool, norm: float) -> None:
        self.skipped_in_a_row = 0 if ok else self.skipped_in_a_row + 1
        if self.skipped_in_a_row >= self.config.max_skipped:
            lower = f"Lower {self.section[0]}.lr" + (", lower algo.clip.high," if self.section[0] == "actor" else "")
            raise DivergedError(
                f"{self.skipped_in_a_row} optimizer steps in a row had a gradient norm of {norm}; the last checkpoint is untouched. "
                f"{lower} or resume from an earlier checkpoint (run.resume=PATH)"
            )

    def _sum_over_ranks(self, results: list[dict[str, float]]) -> Stats:
        """Sums of a mini batch: over its micro batches and the data-parallel ranks on the last stage, then told to the other stages."""
        sums = None
        if self.mesh.pp.is_last:
            sums = self.mesh.sum(sum_of_metrics(results))
        return self._from_last_stage(sums)

    def sleep(self) -> None:
        """Collective. Gradients are freed; the rest moves to host memory as `offload` says. Weights are live until then."""
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
