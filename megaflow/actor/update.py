"""From a mini batch to the loss of each of its micro batches."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megaflow.actor.packing import MicroBatch
from megaflow.actor.transfer import to_device
from megaflow.algo.aggregation import token_weights
from megaflow.algo.losses import LossInputs
from megaflow.parallel.mesh import Mesh
from megaflow.types import Sample


@dataclass(frozen=True)
class MiniBatch:
    """This rank's part of one optimizer step, and the size of the whole over all ranks."""

    samples: list[Sample]
    total_tokens: int  # response tokens
    total_sequences: int


def mini_batches(mesh: Mesh, samples: list[Sample]) -> Iterator[MiniBatch]:
    """Collective. In order of their number; a mini batch without a single response token anywhere is left out."""
    numbers = sorted({n for found in mesh.all_gather(sorted({s.mini_batch for s in samples})) for n in found})
    for number in numbers:
        mine = [s for s in samples if s.mini_batch == number]
        total = mesh.sum({"tokens": sum(s.num_response for s in mine), "sequences": len(mine)})
        if total["tokens"]:
            yield MiniBatch(mine, int(total["tokens"]), int(total["sequences"]))


class LossOfMicroBatch:
    """The loss function that Megatron's schedule calls with the model's output on the last stage. It waits for nothing on the device:

    what it needs of the samples is made on the host, and goes over in one copy while the forward pass still runs.
    """

    def __init__(self, micro_batch: MicroBatch, mini_batch: MiniBatch, objective, algo: Any, device: torch.device):
        self.micro_batch, self.mini_batch, self.objective, self.algo, self.device = micro_batch, mini_batch, objective, algo, device

    def __call__(self, output: Tensor) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        """output [2, R]: logp, entropy -> (this pack's part of the loss, a count that nobody uses, its part of each metric)."""
        logp, entropy = output
        lengths, total_tokens = torch.tensor(self.micro_batch.response_lengths, dtype=torch.int64), self.mini_batch.total_tokens
        weights = token_weights(lengths, self.algo.aggregation, total_tokens, self.mini_batch.total_sequences)
        inputs, weights = loss_inputs(self.micro_batch.samples, lengths, weights, self.device)
        per_token, stats = self.objective(logp, entropy, inputs, self.algo)
        loss = (weights * per_token).sum()
        kept = {"train/loss": loss.detach().clone()}  # the schedule divides the loss in place
        for name, value in stats.items():
            kept[f"train/{name}"] = value.detach().sum() / total_tokens
        return loss, torch.ones((), dtype=torch.int), kept


def loss_inputs(samples: list[Sample], lengths: Tensor, weights: Tensor, device: torch.device) -> tuple[LossInputs, Tensor]:
    """Columns of the samples, response tokens in a row, and the tokens' weights [R]. lengths [n] and weights are on the host."""
    has_ref = all(s.ref_logp is not None for s in samples)
    has_marks = all(s.marked is not None for s in samples)
    advantages = [s.advantage if isinstance(s.advantage, Tensor) else torch.full((s.num_response,), float(s.advantage)) for s in samples]
    empty = torch.zeros(0)
    columns = {
        "old_logp": torch.cat([empty, *(s.old_logp for s in samples)]),
        "advantage": torch.cat([empty, *advantages]),
        "rollout_logp": torch.cat([empty, *(s.rollout_logp for s in samples)]),
        "seq_index": torch.arange(len(samples)).repeat_interleave(lengths),
        **({"ref_logp": torch.cat([empty, *(s.ref_logp for s in samples)])} if has_ref else {}),
        **({"marked": torch.cat([empty.bool(), *(s.marked for s in samples)])} if has_marks else {}),
    }
    *found, weights = to_device([*columns.values(), weights], device)
    return LossInputs(**dict(zip(columns, found, strict=True)), num_seqs=len(samples)), weights


def sum_of_metrics(results: list[dict[str, Tensor]]) -> dict[str, float]:
    """Each named number summed over the micro batches, in float64; one copy to the host. The same names in each, scalars on one device."""
    names = list(results[0])
    sums = torch.stack([torch.stack([r[n].double() for n in names]) for r in results]).sum(0)  # [metrics]
    return dict(zip(names, sums.tolist(), strict=True))
