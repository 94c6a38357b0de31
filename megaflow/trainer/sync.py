"""The policy's weights into the engines: resharded, proven equal, published under a new version."""

from __future__ import annotations

import dataclasses
import time

import torch

from megaflow.actor.actor import Actor
from megaflow.config.schema import Config
from megaflow.monitor.progress import mark
from megaflow.parallel import device
from megaflow.parallel.mesh import Mesh
from megaflow.rollout.base import Rollout
from megaflow.rollout.restarts import Restarts
from megaflow.types import ConfigError, Stats
from megaflow.weights.plan import make_plan
from megaflow.weights.pull import Source, can_pull
from megaflow.weights.reshard import Resharder
from megaflow.weights.source import PullSource, make_source


class Sync:
    """Call it after each update. The order leaves the transfer most room: wake weights, load, actor sleeps, wake the KV cache.

    An engine that is lost meanwhile, or was before, is replaced, and the whole is done again.
    """

    def __init__(self, config: Config, mesh: Mesh, actor: Actor, rollout: Rollout, restarts: Restarts | None = None):
        """Collective. Raises ConfigError when `sync.transport` cannot do what the layout needs.

        restarts: counts those of the reward model's engines too, if there are any.
        """
        self.restarts = restarts or Restarts(mesh, config.rollout.max_restarts)
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
        workers = [dataclasses.replace(layout, rank=r) for r in range(layout.tp)]
        plans = [make_plan(shape, config.parallel, worker, dtype, config.sync.bucket_mb << 20) for worker in workers]
        return Resharder(plans, shape, self.actor.parameters, mesh)

    def __call__(self, version: int) -> Stats:
        """Collective. Returns sync/*; raises ProofError (with `sync.proof`) before anything is published."""
        return self.restarts.again(lambda: self._sync(version), self._make_ready)

    def once_more(self, version: int) -> None:
        """Collective. An engine is lost while the actor sleeps: replace it, and bring all engines the weights of `version` again."""
        self._make_ready()
        self._sync(version)

    def replace_lost(self) -> None:
        """Collective. Another engine in the place of each lost one, awake or asleep as they were, with no weights to serve from.

        An actor that is awake sleeps meanwhile: an engine starts with all its memory, as it did beside an actor without gradients.
        """
        was_awake = not self.actor.sleeper.asleep
        self.actor.sleep()
        self.rollout.replace_lost()
        if was_awake:
            self.actor.wake()

    def _make_ready(self) -> None:
        """Whatever state the loss has left the others in: all engines asleep, the actor awake."""
        self.actor.sleep()
        self.rollout.replace_lost()
        self.rollout.sleep(2)
        self.actor.wake()

    def _sync(self, version: int) -> Stats:
        mark("engines wake")
        self.rollout.wake(("weights",))
        start = time.perf_counter()
        mark(f"weights, version {version}")
        self.rollout.load_weights(self.source, version, self.proof)
        device.synchronize()
        seconds = time.perf_counter() - start
        mark("actor sleeps")
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
    return wanted if wanted != "auto" else "pull" if possible else "buckets"
