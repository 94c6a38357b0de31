"""Weights into tensors of this very process: for a backend whose model lives in the rank itself."""

from __future__ import annotations

import torch
from torch import Tensor

from megaflow.parallel.digest import digest
from megaflow.parallel.shared_memory import nothing
from megaflow.rollout.base import BucketSource, ProofError, PullSource
from megaflow.rollout.engine_pull import Puller


class OwnTensors:
    """tensors: under their names in the Hugging Face folder; name: what errors call the model."""

    def __init__(self, tensors: dict[str, Tensor], name: str):
        self.tensors, self.name = tensors, name
        self.puller: Puller | None = None

    @torch.no_grad()
    def load(self, source: BucketSource | PullSource, proof: bool) -> None:
        """Collective. Raises ProofError, with `proof`, when a tensor is not what the trainer has."""
        self._pull(source, proof) if source.transport == "pull" else self._receive(source, proof)

    def _pull(self, source: PullSource, proof: bool) -> None:
        """As an engine's worker does it: copy from the ranks' memory; the trainer compares the digests."""
        source.offer()
        message = source.message(proof)
        boards = message.pop("boards")
        if self.puller is None:
            self.puller = Puller(boards[0])
        self.puller.load(self.tensors, **message)
        if proof:
            source.start_proof()
        found = source.confirm(nothing, proof)
        if found:
            raise ProofError(found)

    def _receive(self, source: BucketSource, proof: bool) -> None:
        """The stream fills the buffer that it is given, a bucket at a time."""
        buffers: dict[int, Tensor] = {}
        place = next(iter(self.tensors.values())).device
        for filled in source.stream(lambda n: buffers.setdefault(n, torch.empty(n, dtype=torch.uint8, device=place))):
            for name, tensor in filled.tensors():
                self.tensors[name].copy_(tensor)
                if source.flip == filled.plan.index:
                    self.tensors[name].view(-1)[0] += 1
                if proof and digest(self.tensors[name]) != digest(tensor):
                    where = f"bucket {filled.plan.index}, pipeline stage {filled.plan.stage}"
                    raise ProofError(f"{name} in the {self.name} differs from what was sent: {where}")
