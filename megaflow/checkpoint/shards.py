"""Write and read the sharded part of a checkpoint: Megatron's `torch_dist` format, with a failure on any rank known to every rank."""

from __future__ import annotations

import io
import os
import tempfile
import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.core import CheckpointingConfig, save_config
from megatron.core.dist_checkpointing.strategies.async_utils import AsyncRequest
from megatron.core.dist_checkpointing.strategies.filesystem_async import FileSystemWriterAsync
from megatron.core.dist_checkpointing.strategies.fully_parallel import FullyParallelSaveStrategyWrapper
from megatron.core.dist_checkpointing.strategies.state_dict_saver import save_state_dict_async_plan
from megatron.core.dist_checkpointing.strategies.torch import (
    MCoreSavePlanner,
    TorchDistSaveShardedStrategy,
    _replace_state_dict_keys_with_sharded_keys,
    mcore_to_pyt_state_dict,
)
from torch import Tensor
from torch.distributed.checkpoint.filesystem import DEFAULT_SUFFIX, SerializationFormat, _write_item
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem

from megaflow.checkpoint.staging import HostMemory, exact
from megaflow.parallel.mesh import Mesh


class ShardWriter(TorchDistSaveShardedStrategy):
    """In turn: `plan` (collective, touches no file), `stage` (or not), `write` (each rank alone, in any thread), `finish` (rank 0).

    Megatron does the last two in one go, where rank 0 failing to write the index leaves the other ranks waiting for its word,
    and where the reason of a failed write is lost.
    """

    def __init__(self) -> None:
        super().__init__()
        self.num_written = 0  # tensors; grows while `write` runs

    def plan(self, state: dict[str, Any], part: Path, mesh: Mesh) -> None:
        """Collective. Decide who writes what; data-parallel ranks, which hold the same, share the work."""
        self._directory = part
        strategy = self if mesh.dp.size == 1 else FullyParallelSaveStrategyWrapper(self, mesh.dp.group)
        with _quiet(), tempfile.TemporaryDirectory() as empty:  # it looks whether its folder is empty, on rank 0 alone
            dist_checkpointing.save(state, empty, strategy, async_sharded_save=True, async_strategy="mcore")

    def async_save(self, sharded_state_dict: dict[str, Any], checkpoint_dir: Path, async_strategy: str = "mcore") -> AsyncRequest:
        """Collective. Megatron's own plan, with a writer that copies nothing; called by Megatron, which gets a request to do nothing."""
        flat, _, _ = _replace_state_dict_keys_with_sharded_keys(sharded_state_dict, self.keep_only_main_replica)
        self._writer = _Items(self._directory, thread_count=1)
        planner = MCoreSavePlanner(
            dedup_replicated_tensors=not self.keep_only_main_replica, flatten_state_dict=False, flatten_sharded_tensors=False
        )
        planned, *_ = save_state_dict_async_plan(mcore_to_pyt_state_dict(flat), self._writer, planner=planner)
        self._metadata = planned[1]
        return AsyncRequest(None, (), [])

    @property
    def num_bytes(self) -> int:
        """Of the tensors that this rank writes."""
        return sum(t.nbytes for _, t in self._writer.items if isinstance(t, Tensor))

    def stage(self, memory: HostMemory) -> None:
        """Copy to `memory` what does not lie there already; from now on the model and its optimizer may go on."""
        items = self._writer.items
        places = [i for i, (_, t) in enumerate(items) if isinstance(t, Tensor) and not memory.owns(t)]
        for i, copy in zip(places, memory.copy([items[i][1] for i in places]), strict=True):
            items[i] = (items[i][0], copy)

    def write(self) -> list[Any]:
        """Write and fsync this rank's file; what the index must know of it. Raises what went wrong."""
        if not self._writer.items:
            return []
        results = []
        with (self._directory / self._writer.name).open("wb") as stream:
            for item, data in self._writer.items:
                if not threading.main_thread().is_alive():
                    raise RuntimeError("the process ends")  # of a background thread, which would keep it from ending
                results.append(self._write_item(stream, item, data))
                self.num_written += 1
            stream.flush()
            os.fsync(stream.fileno())
        self._writer.items = []  # the memory can be used again
        return results

    def _write_item(self, stream: IO[bytes], item: WriteItem, data: io.BytesIO | Tensor) -> Any:
        return _write_item(self._writer.transforms, stream, _on_host(data), item, self._writer.name, SerializationFormat.TORCH_SAVE)

    def finish(self, results: list[list[Any]]) -> None:
        """Rank 0 only. Write the index, from all ranks' results."""
        self._writer.finish(self._metadata, results)
        save_config(CheckpointingConfig(self.backend, self.version), str(self._directory))


class _Items(FileSystemWriterAsync):
    """Knows what this rank shall write, in one file, and holds the tensors as they are: Megatron's own copies each that is a view."""

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self.items: list[tuple[WriteItem, io.BytesIO | Tensor]] = []

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """torch would make the folder with its parents: under a mount point whose file system is away, too."""
        return plan

    def prepare_write_data(self, plan: SavePlan, planner: SavePlanner) -> None:
        self.name = f"{plan.storage_data.prefix}0{DEFAULT_SUFFIX}"
        self.items = [(item, planner.resolve_data(item)) for item in plan.items]


def _on_host(data: io.BytesIO | Tensor) -> io.BytesIO | Tensor:
    return exact(data.detach().cpu()) if isinstance(data, Tensor) else data


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
