"""Write and read the sharded part of a checkpoint: Megatron's `torch_dist` format, with a failure on any rank known to every rank."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.core import CheckpointingConfig, save_config
from megatron.core.dist_checkpointing.strategies.async_utils import AsyncRequest
from megatron.core.dist_checkpointing.strategies.filesystem_async import FileSystemWriterAsync
from megatron.core.dist_checkpointing.strategies.fully_parallel import FullyParallelSaveStrategyWrapper
from megatron.core.dist_checkpointing.strategies.torch import TorchDistSaveShardedStrategy

from megaflow.parallel.mesh import Mesh


class ShardWriter(TorchDistSaveShardedStrategy):
    """Three acts: `plan` (collective, touches no file), `write` (each rank alone), `finish` (rank 0).

    Megatron does the last two in one go, where rank 0 failing to write the index leaves the other ranks waiting for its word,
    and where the reason of a failed write is lost.
    """

    def plan(self, state: dict[str, Any], part: Path, mesh: Mesh) -> None:
        """Collective. Decide who writes what; data-parallel ranks, which hold the same, share the work."""
        self._directory = part
        strategy = self if mesh.dp.size == 1 else FullyParallelSaveStrategyWrapper(self, mesh.dp.group)
        with _quiet():
            dist_checkpointing.save(state, str(part), strategy, async_sharded_save=True, async_strategy="mcore")

    def _get_save_and_finalize_callbacks(self, writer: FileSystemWriterAsync, planned: tuple, async_strategy: str) -> AsyncRequest:
        """Called by Megatron once the plan is made; we keep it and hand back a request that does nothing."""
        self._writer, self._metadata = writer, planned[1]
        return AsyncRequest(None, (), [])

    def write(self) -> list[Any]:
        """Write and fsync this rank's files; what the index must know of them. Raises what went wrong."""
        results = []
        transforms = [self._writer.transforms] if hasattr(self._writer, "transforms") else []
        for i, bucket in enumerate(self._writer.preload_tensors(self._writer.write_buckets)):
            _, outcome = FileSystemWriterAsync.write_preloaded_data(transforms, i, bucket, None, None, use_fsync=True)
            if isinstance(outcome, Exception):
                raise outcome
            results += outcome
        return results

    def finish(self, results: list[list[Any]]) -> None:
        """Rank 0 only. Write the index, from all ranks' results."""
        self._writer.finish(self._metadata, results)
        save_config(CheckpointingConfig(self.backend, self.version), str(self._directory))


def read(state: dict[str, Any], path: Path) -> dict[str, Any]:
    """Collective. The values for `state`. After exchanging plans each rank reads alone, so that an error here keeps nobody waiting."""
    with _quiet():
        return dist_checkpointing.load(state, str(path))


@contextmanager
def _quiet() -> Iterator[None]:
    """Without what PyTorch has to say to Megatron's authors."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", module=r"torch\.distributed\.checkpoint")
        warnings.filterwarnings("ignore", message="Please use DTensor instead", category=FutureWarning)
        yield
