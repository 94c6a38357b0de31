"""A pipe for weights between a trainer rank and the engine process on the same device: two flat buffers that alternate.

The rank fills buffer k % 2 with bucket k and publishes it; the engine copies bucket k into its parameters and acknowledges. A buffer is
filled again only after that. On CUDA the buffers are device memory, opened in the engine through CUDA IPC; on CPU they are shared memory.
Counters, digests and errors lie in shared memory in both cases, so one request to the engine serves a whole sync.

One of the two transports (`sync.transport`): this one also serves ranks whose weights come from other hosts. See window.py for the other.
"""

from __future__ import annotations

import base64
import os
import pickle
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from megaflow.parallel.shared_memory import (
    ERROR_BYTES,
    ChannelError,
    EndLost,
    map_words,
    nothing,
    open_fd,
    read_error,
    require_process,
    wait_until,
    write_error,
)

NUM_SLOTS = 2
_PUBLISHED, _ACKNOWLEDGED, _FAILED = 0, 1, 2
_HEADER = 8  # int64 words before the digests
_LOST = 2  # value of _FAILED; 1: the error is written behind the digests


class Channel:
    """The trainer's end. `capacity` bytes in each buffer; `num_digests` entries whose digests the engine reports."""

    def __init__(self, capacity: int, num_digests: int, device: torch.device, timeout_s: float):
        self.capacity, self.num_digests, self.device, self.timeout_s = capacity, num_digests, device, timeout_s
        self._control_fd = os.memfd_create("megaflow-control")
        size = 8 * (_HEADER + num_digests) + ERROR_BYTES
        self._control, self._words = map_words(self._control_fd, size)
        self._slots, self._slot_handles = zip(*(self._make_slot() for _ in range(NUM_SLOTS)), strict=True)
        self.check_peer: Callable[[], None] = nothing  # raises when the engine is gone
        self.given_up: Exception | None = None  # then nobody empties the buffers: `acquire` does not wait, `finish` raises it
        self._next = 0

    def _make_slot(self) -> tuple[Tensor, Any]:
        if self.device.type == "cuda":
            slot = torch.empty(self.capacity, dtype=torch.uint8, device=self.device)
            return slot, base64.b64encode(pickle.dumps(slot.untyped_storage()._share_cuda_())).decode()
        fd = os.memfd_create("megaflow-bucket")
        _, words = map_words(fd, (self.capacity + 7) // 8 * 8)
        return words.view(torch.uint8)[: self.capacity], fd

    def descriptor(self) -> dict[str, Any]:
        """What the engine's end needs to open the channel (JSON)."""
        return {
            "pid": os.getpid(),
            "control": self._control_fd,
            "slots": list(self._slot_handles),
            "capacity": self.capacity,
            "num_digests": self.num_digests,
            "device": self.device.type,
            "timeout_s": self.timeout_s,
        }

    def begin(self) -> None:
        """Before each sync."""
        self._words.zero_()
        self._next, self.given_up = 0, None

    def acquire(self, nbytes: int) -> Tensor:
        """The buffer for the next bucket, once the engine has copied what was in it.

        An engine that fails or is gone is not told here: buckets come through collectives that the other ranks wait in. See `finish`.
        """
        assert nbytes <= self.capacity, (nbytes, self.capacity)
        if self.given_up is None:
            try:
                self._wait_acknowledged(self._next - NUM_SLOTS + 1)
            except Exception as e:
                self.given_up = e
        return self._slots[self._next % NUM_SLOTS]

    def publish(self) -> None:
        """The acquired buffer is filled."""
        if self.device.type == "cuda":
            torch.cuda.current_stream().synchronize()
        self._next += 1
        self._words[_PUBLISHED] = self._next

    def finish(self) -> Tensor:
        """Wait until the last bucket is copied; the engine's digests [num_digests] int64. Raises what the engine failed with."""
        if self.given_up is not None:
            raise self.given_up
        self._wait_acknowledged(self._next)
        return self._words[_HEADER : _HEADER + self.num_digests].clone()

    def _wait_acknowledged(self, count: int) -> None:
        wait_until(lambda: int(self._words[_ACKNOWLEDGED]) >= count, self._check, self.timeout_s, "the engine to copy a bucket")

    def _check(self) -> None:
        if int(self._words[_FAILED]) == _LOST:
            raise EndLost("its engine is lost")
        if int(self._words[_FAILED]):
            raise ChannelError(read_error(self._control))
        self.check_peer()


def tell_lost(descriptor: dict[str, Any]) -> None:
    """To the trainer's end of a channel on this host, in the place of an engine that is gone."""
    fd = open_fd(descriptor["pid"], descriptor["control"])
    map_words(fd, 8 * (_HEADER + descriptor["num_digests"]) + ERROR_BYTES)[1][_FAILED] = _LOST
    os.close(fd)  # the mapping was enough


class ChannelEnd:
    """The engine's end."""

    def __init__(self, descriptor: dict[str, Any]):
        d = self.descriptor = descriptor
        self._control, self._words = map_words(open_fd(d["pid"], d["control"]), 8 * (_HEADER + d["num_digests"]) + ERROR_BYTES)
        self._slots = [self._open_slot(handle) for handle in d["slots"]]
        self._seen = 0

    def _open_slot(self, handle: Any) -> Tensor:
        if self.descriptor["device"] == "cuda":
            storage = torch.UntypedStorage._new_shared_cuda(*pickle.loads(base64.b64decode(handle)))
            return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
        fd = open_fd(self.descriptor["pid"], handle)
        return map_words(fd, (self.descriptor["capacity"] + 7) // 8 * 8)[1].view(torch.uint8)

    def begin(self) -> None:
        self._seen = 0

    def receive(self) -> Tensor:
        """The next bucket's buffer, once it is published."""
        d = self.descriptor
        is_published = lambda: int(self._words[_PUBLISHED]) > self._seen  # noqa: E731
        wait_until(is_published, lambda: require_process(d["pid"]), d["timeout_s"], "the trainer's next bucket")
        slot = self._slots[self._seen % NUM_SLOTS]
        self._seen += 1
        return slot

    def acknowledge(self) -> None:
        """The last received bucket is copied; its buffer may be written again."""
        if self.descriptor["device"] == "cuda":
            torch.cuda.current_stream().synchronize()
        self._words[_ACKNOWLEDGED] = self._seen

    def report_digests(self, digests: Tensor) -> None:
        """Before the last `acknowledge`."""
        self._words[_HEADER : _HEADER + len(digests)] = digests.cpu()

    def fail(self, message: str) -> None:
        """Tell the trainer why this end gives up."""
        write_error(self._control, message)
        self._words[_FAILED] = 1
