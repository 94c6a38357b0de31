"""A reward model in SGLang engines of its own, beside the ranks: each group of reward.model.tp ranks has one, asleep unless it scores."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator

from megaflow.config.schema import Config
from megaflow.data.packing import split_balanced
from megaflow.parallel import comm, device
from megaflow.parallel.mesh import Mesh
from megaflow.rollout.base import EngineError
from megaflow.rollout.engine_args import scoring_config
from megaflow.rollout.engine_host import scoring_memory
from megaflow.rollout.engine_process import EngineProcess
from megaflow.rollout.restarts import Restarts, restarted, started
from megaflow.shape import read_shape
from megaflow.types import Sample

UNUSABLE = 7  # last positions of the context, and of the KV cache, that sglang 0.5.15 keeps for tokens to come


class ScoringEngines:
    """The weights are SGLang's own reading of reward.model.path, and never change. shape: the model's, with usable positions."""

    def __init__(self, config: Config, mesh: Mesh, restarts: Restarts):
        """Starts this rank's engine and returns at once. From the main thread."""
        self.restarts = restarts
        size = config.reward.model.tp
        shape = read_shape(config.reward.model.path)
        self.shape = dataclasses.replace(shape, max_positions=shape.max_positions - UNUSABLE)
        self.mesh, self.timeout_s = mesh, config.rollout.timeout_s
        number = mesh.rank // size
        self.name = f"reward engine {number} (ranks {number * size}-{(number + 1) * size - 1})"
        self.owners = [[rank] for rank in range(0, mesh.world_size, size)]
        self._start = lambda: EngineProcess(scoring_config(config), number, self.name, scores=True)
        self.engine = self._start() if [mesh.rank] in self.owners else None
        self.tags, self.is_awake = scoring_memory(device.on_cuda()), False

    def await_start(self) -> None:
        """Collective. All engines are there, asleep. Raises EngineError on every rank if one did not start."""
        self._on_engine(started)

    def share(self, samples: list[Sample]) -> list[Sample]:
        """Collective. What this rank's engine is to score of all ranks' samples: like numbers of tokens for each."""
        return comm.scatter(self.mesh.host_group, samples, self.owners, split_balanced)

    @contextlib.contextmanager
    def awake(self) -> Iterator[ScoringEngines]:
        """Collective. For the time of the block; after an error the run ends, and the engines with it."""
        self.is_awake = True
        self._on_engine(lambda engine: engine.resume(self.tags))
        yield self
        self.is_awake = False
        self._on_engine(lambda engine: engine.release(self.tags))

    def scores(self, samples: list[Sample]) -> list[float]:
        """Collective. The score at the last token of prompt and response of each of `samples`, this rank's share."""
        sequences = [[*s.prompt.tokens, *s.response.tolist()] for s in samples]
        found: list[float] = []

        def score(engine: EngineProcess) -> None:
            found[:] = self._score(engine, sequences)

        self._on_engine(score)
        return found

    def _score(self, engine: EngineProcess, sequences: list[list[int]]) -> list[float]:
        longest, most = max(map(len, sequences), default=0), engine.kv_tokens - UNUSABLE
        if longest > most:  # SGLang would let it wait for ever
            raise EngineError(f"{self.name}: {longest} tokens to score, its KV cache takes {most}; raise reward.model.mem_fraction")
        return engine.score(sequences, self.timeout_s)

    def _on_engine(self, action: Callable[[EngineProcess], None]) -> None:
        self.restarts.again(lambda: self._together(action), lambda: self._together(self._replace_lost))

    def _together(self, action: Callable[[EngineProcess], None]) -> None:
        with self.mesh.together():
            if self.engine is not None:
                action(self.engine)

    def _replace_lost(self, engine: EngineProcess) -> None:
        """Its weights are those of its folder, as before, so there is no version to mind."""
        if engine.is_well():
            return
        engine.kill()
        self.engine = self._start()
        restarted(self.engine)
        if self.is_awake:
            self.engine.resume(self.tags)

    def close(self) -> None:
        """Collective."""
        if self.engine is not None:
            self.engine.close()
        self.mesh.barrier()
