"""Where the actor's bytes are while it sleeps, and weights that wait in host memory."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import time
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor, UntypedStorage

from megaflow.actor.optimizer import torch_optimizers
from megaflow.config.footprint import heaviest_stage, trained_bytes
from megaflow.config.schema import ActorConfig, Config
from megaflow.parallel import device
from megaflow.parallel.mesh import Mesh
from megaflow.shape import ModelShape

log = logging.getLogger(__name__)
BLOCK_BYTES = 1 << 28  # pinned host memory comes in blocks of this size: torch rounds each up to a power of two
RESERVE_BYTES = 6 << 30  # auto: for two CUDA contexts, NCCL, and what the allocators cannot give back


@dataclass(frozen=True)
class Demand:
    """Bytes on one device while the engine generates, and one of a reward model scores beside it."""

    device: int  # what the device has
    engine: int  # what the engine takes of it
    parameters: int  # the actor's, in training precision
    optimizer: int  # main weights and both moments of Adam, in fp32

    @classmethod
    def of(cls, shape: ModelShape, config: Config, settings: ActorConfig, mesh: Mesh) -> Demand:
        """From the sizes alone: nothing is allocated yet. settings: `config.actor`, or another trained model's in its place."""
        total = torch.cuda.get_device_properties(device.device()).total_memory if device.on_cuda() else 0
        config = dataclasses.replace(config, actor=settings)
        held = trained_bytes(config, shape, mesh.world_size, heaviest_stage(shape, config.parallel))  # one choice for all stages
        engine = int(total * engines_fraction(config))
        return cls(device=total, engine=engine, parameters=int(held.parameters), optimizer=int(held.optimizer))


def engines_fraction(config: Config) -> float:
    """Part of a device that its engines take when all are awake: while rewards are given."""
    reward = config.reward.model
    return config.rollout.mem_fraction + (reward.mem_fraction if reward.path and reward.where == "engine" else 0.0)


def choose_offload(offload: str, demand: Demand) -> str:
    """none, optimizer or all. `auto`: the least that lets the sleeping actor and the engine fit on the device; the log says the numbers."""
    if offload != "auto":
        return offload
    if demand.device == 0:
        return "none"  # on a CPU everything is in host memory as it is
    room = demand.device - demand.engine - RESERVE_BYTES
    stays = {"none": demand.parameters + demand.optimizer, "optimizer": demand.parameters, "all": 0}
    chosen = next((mode for mode, left in stays.items() if left <= room), "all")
    gb = {name: f"{value / 1e9:.1f} GB" for name, value in (vars(demand) | {"room": room}).items()}
    log.info(
        "actor.offload=auto: %s (device %s, engine %s, leaves %s; parameters %s, optimizer %s)",
        chosen, gb["device"], gb["engine"], gb["room"], gb["parameters"], gb["optimizer"],
    )  # fmt: skip
    return chosen


class Parking:
    """Moves storages to host memory and back. Tensors stay the objects they are: their storage is emptied and filled again in place.

    The host memory is pinned and allocated once; copies run on a stream of their own, one after another at the link's full speed.
    """

    def __init__(self):
        self.blocks: list[Tensor] = []
        self.parked: list[tuple[UntypedStorage, int]] = []
        self.stream = torch.cuda.Stream() if device.on_cuda() else None

    def park(self, storages: list[UntypedStorage]) -> int:
        """To the host; returns the number of bytes. Their device memory is free when this returns."""
        assert not self.parked, "parked already"
        self.parked = [(s, s.nbytes()) for s in storages if s.nbytes()]
        total = sum(size for _, size in self.parked)
        while len(self.blocks) * BLOCK_BYTES < total:
            self.blocks.append(torch.empty(BLOCK_BYTES, dtype=torch.uint8, pin_memory=self.stream is not None))
        with self._on_stream():
            for host, on_device in self._pieces():
                host.copy_(on_device, non_blocking=True)
        if self.stream is not None:
            self.stream.synchronize()
        for storage, _ in self.parked:
            storage.resize_(0)
        return total

    def unpark(self) -> None:
        """Back to the device. Later work on the current stream waits for it; the host does not."""
        for storage, size in self.parked:
            storage.resize_(size)
        with self._on_stream():
            for host, on_device in self._pieces():
                on_device.copy_(host, non_blocking=True)
        if self.stream is not None:
            torch.cuda.current_stream().wait_stream(self.stream)
        self.parked = []

    def _pieces(self) -> Iterable[tuple[Tensor, Tensor]]:
        """(host, device) bytes: the storages one after another, cut where a block ends."""
        place = 0
        for storage, size in self.parked:
            whole = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage, 0, (size,))
            start = 0
            while start < size:
                block, offset = divmod(place, BLOCK_BYTES)
                count = min(size - start, BLOCK_BYTES - offset)
                yield self.blocks[block][offset : offset + count], whole[start : start + count]
                start, place = start + count, place + count

    @contextlib.contextmanager
    def _on_stream(self):
        if self.stream is None:
            yield
            return
        self.stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.stream):
            yield


class Sleeper:
    """Frees gradients; moves optimizer state (and weights) to host memory as `offload` says: none, optimizer, all.

    seconds, nbytes   of the last sleep's and the last wake's copies, for whoever measures them
    """

    def __init__(self, model, optimizer, offload: str, on_cpu: bool = False):
        """on_cpu: do it there too, where it only moves bytes from host memory to host memory (tests)."""
        assert offload in ("none", "optimizer", "all"), offload  # auto: see `choose_offload`
        self.model, self.optimizer = model, optimizer
        self.offload = offload if device.on_cuda() or on_cpu else "none"
        self.parking = Parking()
        self.asleep = False
        self.nbytes, self.seconds = 0, {"sleep": 0.0, "wake": 0.0}

    def sleep(self) -> None:
        if self.asleep:
            return
        device.synchronize()
        self.model.offload_grad_buffers()
        start = time.perf_counter()
        self.nbytes = self.parking.park(self._storages())
        self.seconds["sleep"] = time.perf_counter() - start
        device.release_cached_memory()
        self.asleep = True

    def wake(self) -> None:
        if not self.asleep:
            return
        start = time.perf_counter()
        self.parking.unpark()
        self.model.restore_grad_buffers()  # waits for the device
        self.seconds["wake"] = time.perf_counter() - start
        self.asleep = False

    def _storages(self) -> list[UntypedStorage]:
        """What moves, each storage once. In fp32 training the optimizer's main weights are views of the parameters and move with these."""
        if self.offload == "none":
            return []
        weights = by_address(p.data for chunk in self.model for p in chunk.parameters())
        state = by_address(t for adam in torch_optimizers(self.optimizer) for t in _state_of(adam))
        moving = {address: s for address, s in state.items() if address not in weights}
        return list((moving | weights if self.offload == "all" else moving).values())


def by_address(tensors: Iterable[Tensor]) -> dict[int, UntypedStorage]:
    return {t.untyped_storage().data_ptr(): t.untyped_storage() for t in tensors if t.untyped_storage().nbytes()}


def _state_of(adam: torch.optim.Optimizer) -> Iterable[Tensor]:
    """Main weights and moments; not `step`, whose few bytes may be on the host."""
    for group in adam.param_groups:
        for p in group["params"]:
            yield p.data
            yield from (t for name, t in adam.state[p].items() if name != "step")


class HostCopy:
    """Weights in (pinned) host memory."""

    @torch.no_grad()
    def __init__(self, parameters: dict[str, Tensor]):
        self.tensors = {n: torch.empty_like(p, device="cpu", pin_memory=p.is_cuda).copy_(p.detach()) for n, p in parameters.items()}

    @contextlib.contextmanager
    @torch.no_grad()
    def swapped_in(self, parameters: dict[str, Tensor]):
        """For the time of the block, `parameters` hold these weights."""
        device.synchronize()
        mine = {n: p.detach().clone() for n, p in parameters.items()}
        for n, p in parameters.items():
            p.copy_(self.tensors[n], non_blocking=True)
        try:
            yield
        finally:
            for n, p in parameters.items():
                p.copy_(mine[n])
