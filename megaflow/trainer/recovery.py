"""A rollout that survives the loss of engines: they are started anew, get the weights of the version that is served, proven as always, and
what they had not finished is generated again, with the same seeds."""

from __future__ import annotations

from typing import Any

from megaflow.rollout.base import BucketSource, PullSource, Rollout
from megaflow.trainer.sync import Sync
from megaflow.types import Layout, Sample


class SteadyRollout:
    """A base.Rollout around another one. Which engines are lost is found out where all ranks meet: at the end of each verb."""

    def __init__(self, rollout: Rollout, sync: Sync):
        self.rollout, self.sync, self.restarts = rollout, sync, sync.restarts

    @property
    def layout(self) -> Layout:
        return self.rollout.layout

    @property
    def version(self) -> int:
        return self.rollout.version

    @property
    def returns_routes(self) -> bool:
        return self.rollout.returns_routes

    def generate(self, prompts: list, sampling: Any, seed: tuple[int, int], num_samples: int, version: int, **more: Any) -> list[Sample]:
        """Collective. See base.Rollout."""
        return self.restarts.again(
            lambda: self.rollout.generate(prompts, sampling, seed, num_samples, version, **more), lambda: self.sync.once_more(version)
        )

    def load_weights(self, source: BucketSource | PullSource, version: int, proof: bool) -> None:
        """Collective. See base.Rollout. A sync mends itself as a whole: the actor has a part in it."""
        self.rollout.load_weights(source, version, proof)

    def sleep(self, level: int) -> None:
        """Collective. See base.Rollout."""
        self.restarts.again(lambda: self.rollout.sleep(level), self.sync.replace_lost)

    def wake(self, tags: tuple[str, ...]) -> None:
        """Collective. See base.Rollout. What a level-1 sleep had kept is gone with an engine: then only a sync makes all of them fresh."""
        self.restarts.again(lambda: self.rollout.wake(tags), self.sync.replace_lost)

    def close(self) -> None:
        """Collective."""
        self.rollout.close()
