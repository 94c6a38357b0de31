"""Router replay: the experts that the engine chose for each token, in the trainer's forward pass.

Rollout Routing Replay, R3 (Ma et al. 2025, arXiv:2510.11370): only the choice is replayed. The weights of the chosen experts are
the trainer's own scores of them, normalised as the family does, so gradients reach the router; an expert bias (DeepSeek-V3) takes part in
choosing alone, and so in nothing here.

Megatron-core has a RouterReplay of its own, whose place a `Replay` takes (`router.router_replay`). That one holds the next pack's routes in
a global list and must be told when a backward pass begins to compute a layer again. Here routes come with the pack itself, as
`packed_seq_params` does: whatever the schedule makes of micro batches, chunks and recomputation, a layer has the routes of its own input.
"""

from __future__ import annotations

import contextlib
import copy
import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from megaflow.actor.chunks import Chunks
from megaflow.actor.packing import MicroBatch, Packed, Routes
from megaflow.actor.transfer import to_device
from megaflow.parallel.mesh import Mesh
from megaflow.shape import Experts, ModelShape
from megaflow.types import PreflightError, Sample, Stats


@dataclass
class Tally:
    """What was counted of the routes so far, on the device: [how many the trainer would not have chosen, how many there were]."""

    found: Tensor  # [2] int64
    counts: bool = False  # whether a forward pass adds to it

    def add(self, chosen: Tensor, natural: Tensor, known: Tensor) -> None:
        """chosen, natural [T, K]; known [T] bool: tokens that have a route."""
        agreed = (chosen.unsqueeze(2) == natural.unsqueeze(1)).any(2)
        self.found += torch.stack([(~agreed & known[:, None]).sum(), known.sum() * chosen.shape[1]])


class Replay:
    """Of one router. Its layer gives it `routes` before each forward pass, None for a pack without."""

    def __init__(self, place: int, tally: Tally, replays: bool):
        """place: of this layer among the layers of Routes.chosen; replays: False: count only."""
        self.place, self.tally, self.replays = place, tally, replays
        self.routes: Routes | None = None

    def get_replay_topk(
        self, scores: Tensor, topk: int, num_groups: int | None, group_topk: int | None, default_compute_topk: Callable
    ) -> tuple[Tensor, Tensor]:
        """Called by Megatron's router. scores [T, E] -> (their values at the experts [T, K], the experts [T, K] int64).

        A token without a route goes where its own router says. Where both name the same experts, their order is the router's, so that
        sums over them round alike.
        """
        values, natural = default_compute_topk(scores, topk, num_groups=num_groups, group_topk=group_topk)
        if self.routes is None:
            return values, natural
        chosen, known = self.routes.chosen[:, self.place].long(), self.routes.known
        assert chosen.shape == natural.shape, f"routes of {list(chosen.shape)} for a router that chooses {list(natural.shape)}"
        if self.tally.counts:
            self.tally.add(chosen, natural, known)
        if not self.replays:
            return values, natural
        differs = (chosen.sort(1).values != natural.sort(1).values).any(1)
        chosen = torch.where((known & differs)[:, None], chosen, natural)
        return scores.gather(1, chosen), chosen


class Replays:
    """Of a policy's routers on this rank."""

    def __init__(self, shape: ModelShape, chunks: Chunks, mesh: Mesh, device: torch.device, mode: str, sequence_parallel: bool):
        """mode: `actor.router_replay`, not none. Raises PreflightError for a model without experts."""
        if shape.experts is None:
            raise PreflightError(f"actor.router_replay={mode} is for models with experts, and this one has none; set it to none")
        self.experts: Experts = shape.experts
        self.replays, self.is_free = mode == "R3", False
        self.tally = Tally(torch.zeros(2, dtype=torch.int64, device=device))
        self.mesh, self.device, self.cut = mesh, device, mesh.tp if sequence_parallel else None
        numbers = [i for i in range(shape.num_layers) if shape.is_sparse(i)]
        layers = [layer for gpt in chunks.unwrapped() for layer in gpt.decoder.layers if shape.is_sparse(layer.layer_number - 1)]
        self.places = torch.tensor([numbers.index(layer.layer_number - 1) for layer in layers], dtype=torch.int64)
        for place, layer in enumerate(layers):
            replay = layer.mlp.router.router_replay = Replay(place, self.tally, self.replays)
            layer.register_forward_pre_hook(functools.partial(_give, replay), with_kwargs=True)

    @contextlib.contextmanager
    def free(self) -> Iterator[None]:
        """For the time of the block every router chooses for itself, and nothing is counted."""
        self.is_free = True
        try:
            yield
        finally:
            self.is_free = False

    @contextlib.contextmanager
    def counting(self) -> Iterator[None]:
        """For the time of the block forward passes count how many routes differ; see `differ`."""
        self.tally.counts = not self.is_free
        try:
            yield
        finally:
            self.tally.counts = False

    def of(self, samples: list[Sample], packed: Packed) -> Routes | None:
        """The routes of a pack, for the layers and tokens of this rank, on the host; None when nobody will read them."""
        if self.is_free or not (self.replays or self.tally.counts) or all(s.routes is None for s in samples):
            return None
        total, width = sum(packed.lengths), self.experts.top_k
        kind = next(s.routes.dtype for s in samples if s.routes is not None)
        chosen = torch.zeros(total, len(self.places), width, dtype=kind)
        known = torch.zeros(total, dtype=torch.bool)
        start = 0
        for s, length in zip(samples, packed.lengths, strict=False):  # behind the samples there may be padding
            if s.routes is not None:
                rows = slice(start, start + len(s.routes))
                chosen[rows], known[rows] = s.routes[:, self.places], True
            start += length
        if packed.context is not None:
            mine = packed.context.mine.cpu()
            chosen, known = chosen[mine], known[mine]
        if self.cut is not None:
            chosen, known = (x.chunk(self.cut.size)[self.cut.index] for x in (chosen, known))
        return Routes(chosen, known)

    def on_device(self, packed: Packed) -> Packed:
        """The same pack with its routes on the device: as long as its forward and backward pass need them, and no longer."""
        if packed.routes is None:
            return packed
        moved = copy.copy(packed)
        moved.routes = Routes(*to_device([packed.routes.chosen, packed.routes.known], self.device))
        return moved

    def differ(self) -> Stats:
        """Collective. moe/routes_differ of what was counted since the last call; nothing without routes.

        Over all ranks: those of a replica have each other tokens or other layers, or all the same ones.
        """
        found = self.mesh.all_gather(self.tally.found.tolist())
        self.tally.found.zero_()
        differing, total = (sum(column) for column in zip(*found, strict=True))
        return {"moe/routes_differ": differing / total} if total else {}


def with_routes(replays: Replays | None, micro_batch: MicroBatch) -> MicroBatch:
    """Its pack with the routes of its samples."""
    if replays is not None:
        micro_batch.packed.routes = replays.of(micro_batch.samples, micro_batch.packed)
    return micro_batch


def _give(replay: Replay, layer: torch.nn.Module, args: tuple, kwargs: dict) -> None:
    """A hook that runs before a layer does, also when the backward pass computes it again: with the pack of that time."""
    replay.routes = kwargs["packed_seq_params"].routes
