"""Where the actor's bytes are while it sleeps, and weights that wait in host memory."""

from __future__ import annotations

import contextlib

import torch
from torch import Tensor

from megaflow.parallel import device


class Sleeper:
    """Frees gradients; moves optimizer state (and weights) to host memory as `offload` says: none, optimizer, all."""

    def __init__(self, model, optimizer, offload: str):
        self.model, self.optimizer = model, optimizer
        self.offload = {"auto": "optimizer"}.get(offload, offload) if device.on_cuda() else "none"  # on CPU everything is host memory
        self.asleep = False

    def sleep(self) -> None:
        if self.asleep:
            return
        self.model.offload_grad_buffers()
        if self.offload in ("optimizer", "all"):
            self.optimizer.offload_to_cpu()
        if self.offload == "all":
            for buffer in self.model.buffers:
                buffer.offload_to_cpu(move_params=True, move_grads=False)
        device.release_cached_memory()
        self.asleep = True

    def wake(self) -> None:
        if not self.asleep:
            return
        if self.offload == "all":
            for buffer in self.model.buffers:
                buffer.reload_from_cpu(move_params=True, move_grads=False)
        if self.offload in ("optimizer", "all"):
            self.optimizer.restore_from_cpu()
        self.model.restore_grad_buffers()
        self.asleep = False


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
