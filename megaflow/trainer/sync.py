"""The policy's weights into the engines: resharded, proven equal, published under a new version."""

from __future__ import annotations

import time

import torch

from megaflow.actor.actor import Actor
from megaflow.config.schema import Config
from megaflow.parallel import device
from megaflow.parallel.mesh import Mesh
from megaflow.rollout.base import Rollout
from megaflow.types import Stats
from megaflow.weights.plan import make_plan
from megaflow.weights.reshard import Resharder


class Sync:
    """Call it after each update. The order leaves the transfer most room: wake weights, stream, actor sleeps, wake the KV cache."""

    def __init__(self, config: Config, mesh: Mesh, actor: Actor, rollout: Rollout):
        self.proof = config.sync.proof
        self.actor, self.rollout = actor, rollout
        dtype = getattr(torch, config.model.dtype)
        self.plan = make_plan(actor.shape, mesh.tp.size, mesh.pp.size, rollout.layout, dtype, config.sync.bucket_mb << 20)
        self.resharder = Resharder(self.plan, actor.shape, actor.parameters, mesh)
        self.entries = [[(e.name, e.shape, e.offset, e.nbytes) for e in bucket.entries] for bucket in self.plan.buckets]

    def __call__(self, version: int) -> Stats:
        """Collective. Returns sync/*; raises ProofError (with `sync.proof`) before anything is published."""
        self.rollout.wake(("weights",))
        start = time.perf_counter()
        self.rollout.load_weights(self.resharder.stream, self.entries, version, self.proof)
        device.synchronize()
        seconds = time.perf_counter() - start
        self.actor.sleep()
        self.rollout.wake(("kv_cache",))
        return {
            "sync/bytes": float(self.plan.nbytes),  # that one rank hands to its engine worker
            "sync/gb_per_s": self.plan.nbytes / 1e9 / seconds,
            "sync/version": float(version),
            "sync/proof": float(self.proof),
        }
