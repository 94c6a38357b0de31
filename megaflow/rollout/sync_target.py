"""The trainer's side of loading an engine: drive the channel, compare digests."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from megaflow.parallel.channel import Channel
from megaflow.parallel.digest import digest
from megaflow.rollout.base import ProofError, Stream


def send(channel: Channel, stream: Stream, proof: bool) -> None:
    """Pass every bucket of `stream` through `channel`; with `proof` compare the engine's digests with those of what was sent.

    Raises ProofError naming the first tensor that differs, its bucket and pipeline stage.
    """
    sent: list[Tensor] = []
    names: list[tuple[str, Any]] = []
    for filled in stream(channel.acquire):
        channel.publish()
        for name, tensor in filled.tensors():  # the engine only reads the buffer, so both sides may look at it at once
            if proof:
                sent.append(digest(tensor))
            names.append((name, filled.plan))
    loaded = channel.finish()
    if not proof:
        return
    wrong = (torch.stack(sent).cpu() != loaded).nonzero()[:, 0].tolist()
    if wrong:
        name, bucket = names[wrong[0]]
        raise ProofError(
            f"{name} in the engine differs from what was sent: bucket {bucket.index}, pipeline stage {bucket.stage}"
            f" ({len(wrong)} of {len(names)} tensors differ)"
        )
