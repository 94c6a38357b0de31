"""What every rollout backend does: five verbs, all collective, and one rule on seeds."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from typing import Any, Protocol

from torch import Tensor

from megaflow.config.schema import SamplingConfig
from megaflow.types import Layout, MendableError, Prompt, Sample

Stream = Callable[[Callable[[int], Tensor]], Iterator[Any]]  # acquire(bytes) -> buffer; yields filled buckets (weights.FilledBucket)


class BucketSource(Protocol):
    """Weights that come in buckets, through collectives of the ranks.

    entries      for each worker of the engine (one for all, if they do not differ) and bucket, what the stream will bring: name, size of
                 the engine's tensor, first element in it, offset and bytes in the bucket, dtype
    flip         bucket whose first value is changed in the engine, for tests; -1: none
    """

    transport: str  # "buckets"
    flip: int

    @property
    def entries(self) -> list[list[list[tuple]]]: ...

    def stream(self, acquire: Callable[[int], Tensor]) -> Iterator[Any]: ...


class PullSource(Protocol):
    """Weights that engine workers read from the ranks' windows (weights/source.py). In order: offer, message, start_proof, confirm.

    engine_lost, by the owner of an engine, in the place of what it has not done yet: other ranks shall not wait for its workers.
    """

    transport: str  # "pull"
    flip: int  # piece whose first value is changed in the engine

    def offer(self) -> None: ...

    def message(self, proof: bool) -> dict[str, Any]: ...

    def start_proof(self) -> None: ...

    def engine_lost(self) -> None: ...

    def confirm(self, check: Callable[[], None], proof: bool) -> str: ...


class EngineError(RuntimeError):
    """An engine refused something, or did not start. The message names it."""


class EngineLost(EngineError, MendableError):
    """An engine died or hangs. The message names it. Raised on every rank; `Rollout.replace_lost` starts another one in its place."""


class StaleWeights(RuntimeError):
    """A request came before the engine had the trainer's weights."""


class Rollout(Protocol):
    """layout: how this rank's engine worker wants its weights; version: of the weights it holds, -1 when it holds none to serve from.

    A backend with processes of its own raises EngineLost, on every rank, from the verb in which it notices that one is lost, and has also
    `replace_lost()`, collective: they are started anew, awake or asleep as the others, and hold no weights to serve from. The verb may then
    be called again.

    returns_routes: it can say which experts each token went to; `generate` gets `routes` only where it does
    """

    layout: Layout
    version: int
    returns_routes: bool = False

    def generate(
        self,
        prompts: list[Prompt],
        sampling: SamplingConfig,
        seed: tuple[int, int],
        num_samples: int,
        version: int,
        routes: bool = False,
    ) -> list[Sample]:
        """Collective. `num_samples` for each prompt, in (group, index) order; each rank that owns an engine gets its own part.

        prompts is the same list on every rank; seed is (run seed, step). The same seed, prompt and weights give the same tokens,
        whatever else is generated beside them. Raises StaleWeights unless the engine's version is `version`. routes: fill the samples'
        `routes`, of a model with experts.
        """

    def load_weights(self, source: BucketSource | PullSource, version: int, proof: bool) -> None:
        """Collective. Take all weights from `source`; serve nothing until every engine holds `version`.

        With `proof` digests are compared after loading; raises ProofError that names the first tensor that differs.
        """

    def sleep(self, level: int) -> None:
        """Collective. Free the KV cache and the weights; level 1 keeps a copy of these in host memory, level 2 drops them.
        Nothing is done to what sleeps already."""

    def wake(self, tags: tuple[str, ...]) -> None:
        """Collective. Take memory back for "weights", "kv_cache" or both; in two steps, so that a sync between them has the most room."""

    def close(self) -> None:
        """Collective."""


class ProofError(RuntimeError):
    """After a sync an engine's tensor is not what the trainer sent."""


def sample_seed(seed: tuple[int, int], prompt_id: str, index: int) -> int:
    """31-bit seed of one sample: from (run seed, step), the prompt and the number of the sample, and from nothing else."""
    text = f"{seed[0]}/{seed[1]}/{prompt_id}/{index}".encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest()) & 0x7FFFFFFF


def share_of_engine(num_prompts: int, engine: int, num_engines: int) -> list[int]:
    """The prompts that an engine answers: every num_engines-th, so that neighbours of like length spread."""
    return list(range(engine, num_prompts, num_engines))
