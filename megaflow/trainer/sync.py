"""The policy's weights into the engines: resharded, proven equal, published under a new version."""

from __future__ import annotations

import time

import torch

from megaflow.actor.actor import Actor
from megaflow.config.schema import Config
from megaflow.parallel import device
from megaflow.parallel.mesh import Mesh
from megaflow.rollout.base import Rollout
from megaflow.types import ConfigError, Stats
from megaflow.weights.plan import make_plan
from megaflow.weights.pull import Source, can_pull
from megaflow.weights.reshard import Resharder
from megaflow.weights.source import PullSource, make_source


class Sync:
    """Call it after each update. The order leaves the transfer most room: wake weights, load, actor sleeps, wake the KV cache."""

    def __init__(self, config: Config, mesh: Mesh, actor: Actor, rollout: Rollout):
        """Collective. Raises ConfigError when `sync.transport` cannot do what the layout needs."""
        self.proof = config.sync.proof
        self.actor, self.rollout = actor, rollout
        where = make_source(mesh, config.parallel.vpp)
        self.transport = choose_transport(config, actor, where)
        self.source = self._pull(config, mesh, where) if self.transport == "pull" else self._buckets(config, mesh)

    def _pull(self, config: Config, mesh: Mesh, where: Source) -> PullSource:
        keep = self.actor.sleeper.offload != "all"  # else parameters move at each sleep, and no engine may hold on to where they were
        dtype, shape = getattr(torch, config.model.dtype), self.actor.shape
        timeout_s = config.rollout.timeout_s
        return PullSource(shape, self.actor.parameters, mesh, where, self.rollout.layout, dtype, timeout_s, keep)

    def _buckets(self, config: Config, mesh: Mesh) -> Resharder:
        dtype, shape, layout = getattr(torch, config.model.dtype), self.actor.shape, self.rollout.layout
        plan = make_plan(shape, mesh.tp.size, mesh.pp.size, layout, dtype, config.sync.bucket_mb << 20)
        return Resharder(plan, shape, self.actor.parameters, mesh)

    def __call__(self, version: int) -> Stats:
        """Collective. Returns sync/*; raises ProofError (with `sync.proof`) before anything is published."""
        self.rollout.wake(("weights",))
        start = time.perf_counter()
        self.rollout.load_weights(self.source, version, self.proof)
        device.synchronize()
        seconds = time.perf_counter() - start
        self.actor.sleep()
        self.rollout.wake(("kv_cache",))
        return {
            "sync/bytes": float(self.source.nbytes),  # that one rank's engine worker gets
            "sync/seconds": seconds,
            "sync/gb_per_s": self.source.nbytes / 1e9 / seconds,
            "sync/version": float(version),
            "sync/proof": float(self.proof),
            **self._details(),
        }

    def _details(self) -> Stats:
        """What only a pull knows."""
        if self.transport != "pull":
            return {}
        copy_ms, proof_ms = self.source.milliseconds
        return {"sync/copy_ms": copy_ms, "sync/proof_ms": proof_ms, "sync/link_bytes": float(self.source.reading.link_bytes)}


def choose_transport(config: Config, actor: Actor, where: Source) -> str:
    """pull or buckets, the same on every rank. Raises ConfigError when `sync.transport` asks for what cannot be."""
    wanted, possible = config.sync.transport, can_pull(actor.shape, where)
    if wanted == "pull" and not possible:
        raise ConfigError(
            f"sync.transport=pull reads memory of its own host, and some engine's weights lie on another one "
            f"(tp={where.tp}, pp={where.pp}, ep={where.ep} over {len({p.host for p in where.places})} hosts); use sync.transport=buckets"
        )
    chosen = wanted if wanted != "auto" else "pull" if possible else "buckets"
    if chosen == "buckets" and (actor.shape.experts is not None or where.vpp > 1):
        raise ConfigError(
            "weights go in buckets (sync.transport=buckets, or an engine's weights lie on several hosts), which does not know experts "
            f"and virtual pipeline stages yet (vpp={where.vpp}); let each engine's weights lie on one host"
        )
    return chosen
