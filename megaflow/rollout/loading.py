"""How the ranks load an SGLang engine: one request to it, and what the ranks do meanwhile. One function for each transport."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any

import torch

from megaflow.parallel import device
from megaflow.parallel.channel import Channel, tell_lost
from megaflow.parallel.mesh import Mesh
from megaflow.parallel.shared_memory import ChannelError, EndLost, nothing
from megaflow.rollout.base import BucketSource, EngineError, EngineLost, ProofError, PullSource
from megaflow.rollout.engine_process import EngineProcess
from megaflow.rollout.sync_target import send


class Loader:
    """A rank's part in loading its engine; `engine` is None except on the rank that owns it."""

    def __init__(self, mesh: Mesh, engine: EngineProcess | None, name: str, timeout_s: float):
        self.mesh, self.engine, self.name, self.timeout_s = mesh, engine, name, timeout_s
        self.channel: Channel | None = None
        self.pending: Future | None = None  # a request whose work is known to be done, but not yet its answer

    def use(self, engine: EngineProcess) -> None:
        """Another one, in the place of one that is lost."""
        self.engine, self.pending = engine, None

    def load(self, source: BucketSource | PullSource, proof: bool) -> Exception | None:
        """What all ranks are to be told: a ProofError, or that this rank's engine refused or is lost; None when all is well."""
        try:
            return self._pull(source, proof) if source.transport == "pull" else self._receive(source, proof)
        except EndLost as e:
            return EngineLost(f"{self.name}, tp rank {self.mesh.rollout.index}: {e}")
        except ChannelError as e:
            return EngineError(f"{self.name}, tp rank {self.mesh.rollout.index}: {e}")
        except EngineError as e:
            return e

    def _pull(self, source: PullSource, proof: bool) -> ProofError | None:
        """The workers poll for every rank's offer by themselves, so the request need not wait for the other ranks."""
        source.offer()
        try:
            request = self._request({"pull": source.message(proof)})
            if proof:
                source.start_proof()
            found = source.confirm(self._check(request), proof)
        except (EngineError, ChannelError):
            if self.engine is not None and self.engine.dead:  # the ranks whose windows it was to read from
                source.engine_lost()
            raise
        self.pending = request
        return ProofError(found) if found else None

    def _receive(self, source: BucketSource, proof: bool) -> ProofError | None:
        """The request stays open while buckets flow; only its answer says that all is done."""
        channel = self._open_channel(source.entries)
        descriptors: list[Any] = [None] * self.mesh.rollout.size
        torch.distributed.all_gather_object(descriptors, channel.descriptor(), group=self.mesh.rollout.group)
        channel.begin()
        torch.distributed.barrier(group=self.mesh.rollout.group)  # every channel is empty before an engine looks into it
        what = {"proof": proof, "flip": source.flip}
        try:
            request = self._request({"channels": descriptors, "buckets": source.entries, **what})
            channel.check_peer = self._check(request, descriptors)
        except EngineError as e:
            self._tell_if_lost(descriptors)
            channel.given_up = e  # the buckets are made by all ranks together, so this one goes through them too
        error = None
        try:
            send(channel, source.stream, proof)
        except ProofError as e:
            error = ProofError(f"{self.name}, tp rank {self.mesh.rollout.index}: {e}")
        self.pending = request
        self.settle()
        return error

    def _open_channel(self, entries: list[list[list[tuple]]]) -> Channel:
        if self.channel is None:
            mine = entries[self.mesh.rollout.index % len(entries)]
            capacity = max(sum(-(-nbytes // 256) * 256 for *_, nbytes, _ in bucket) for bucket in mine)
            count = sum(len(bucket) for bucket in mine)
            self.channel = Channel(capacity, count, device.device(), self.timeout_s)
        return self.channel

    def settle(self) -> None:
        """Before the engine is used again: its own answer to the last load. Raises EngineError when that is an error."""
        if self.pending is not None:
            request, self.pending = self.pending, None
            self.engine.wait(request, self.timeout_s, "loading weights")

    def _request(self, message: dict[str, Any]) -> Future | None:
        self.settle()
        return self.engine.load_weights(json.dumps(message)) if self.engine is not None else None

    def _tell_if_lost(self, descriptors: Sequence[dict[str, Any]]) -> None:
        """The other ranks of this engine wait for its workers to empty their channels, and know nothing of its processes."""
        if self.engine is not None and self.engine.dead:
            for descriptor in descriptors:
                tell_lost(descriptor)

    def _check(self, request: Future | None, descriptors: Sequence[dict[str, Any]] = ()) -> Callable[[], None]:
        """Raises when there is nothing to wait for any more. descriptors: whom to tell that the engine is lost."""
        if request is None:
            return nothing

        def check() -> None:
            self._tell_if_lost(descriptors)
            self.engine.require_alive()
            if request.done():  # before everything is copied: it was refused, or could not open what it was to read
                request.result()
                raise EngineError(f"{self.name} ended the load before everything was copied")

        return check
