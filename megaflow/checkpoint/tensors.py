"""A checkpoint's parameters one at a time, in one process and without building the model: for conversion, inspection and comparison."""

from __future__ import annotations

import itertools
import pickle
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, ReadItem
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from megaflow.checkpoint import manifest
from megaflow.types import PreflightError

INDEX = ".metadata"
OTHER_STATE = ("optimizer.", "critic.", "common_state")
# Megatron saves a norm that Transformer Engine would fuse into the next layer under that layer's name
FUSED_NORMS = {
    "input_layernorm.weight": "self_attention.linear_qkv.layer_norm_weight",
    "pre_mlp_layernorm.weight": "mlp.linear_fc1.layer_norm_weight",
}


class SavedTensors:
    """The policy's parameters in the checkpoint at `path`, whole, in Megatron's layout for tp=1, whatever layout saved them.

    Raises PreflightError when it is not one of ours or damaged.
    """

    def __init__(self, path: Path):
        self.path = path
        try:
            self.manifest = manifest.read(path)
        except (OSError, manifest.BadManifest) as e:
            raise PreflightError(f"{path} is not a whole checkpoint of megaflow: {e}") from e
        if lacking := manifest.missing(path, self.manifest) or manifest.damaged(path, self.manifest, [INDEX]):
            raise PreflightError("\n".join(lacking))
        self._reader = FileSystemReader(path)
        metadata = self._reader.read_metadata()
        self._reader.set_up_storage_reader(metadata, is_coordinator=True)
        self.saved: dict[str, TensorStorageMetadata] = {
            name: entry
            for name, entry in metadata.state_dict_metadata.items()
            if isinstance(entry, TensorStorageMetadata) and not name.startswith(OTHER_STATE)
        }

    def damaged(self, rank: int = 0, world: int = 1) -> list[str]:
        """Sentences on files that are not as they were written; reads every `world`-th from `rank` on."""
        return manifest.damaged(self.path, self.manifest, sorted(self.manifest.files)[rank::world])

    def find(self, name: str) -> tuple[torch.dtype, tuple[int, ...]] | None:
        """dtype and shape of a parameter by its global name; None: there is none."""
        if (place := self._place(name)) is None:
            return None
        key, index = place
        return self.saved[key].properties.dtype, tuple(self.saved[key].size)[len(index) :]

    def unread(self, names: Iterable[str]) -> list[str]:
        """Tensors here that are none of these parameters; of several saved as one, e.g. `decoder.layers.mlp.linear_fc1.weight[2]`."""
        read = {place for name in names if (place := self._place(name)) is not None}
        depth = {key: len(index) for key, index in read}
        left = []
        for key, entry in self.saved.items():
            indices = [index for index in itertools.product(*map(range, entry.size[: depth.get(key, 0)])) if (key, index) not in read]
            left += [key + "".join(f"[{i}]" for i in index) for index in indices]
        return left

    def read(self, name: str) -> Tensor:
        place = self._place(name)
        assert place is not None, name
        key, index = place
        entry = self.saved[key]
        size = (*[1] * len(index), *entry.size[len(index) :])
        target = torch.empty(size, dtype=entry.properties.dtype)
        offsets = torch.Size((*index, *[0] * (len(size) - len(index))))
        items = create_read_items_for_chunk_list(key, entry, [ChunkStorageMetadata(offsets, torch.Size(size))])
        found = sum(item.lengths.numel() for item in items)
        if found != target.numel():
            raise PreflightError(f"{self.path}: {key} is not whole: {found:,} of {target.numel():,} values")
        try:
            self._reader.read_data(LoadPlan(items), _Into(target))
        except (OSError, RuntimeError, pickle.UnpicklingError, EOFError) as e:
            files = sorted({self._reader.storage_data[item.storage_index].relative_path for item in items})
            raise PreflightError(f"{self.path}: {key} cannot be read from {', '.join(files)}: {e}") from e
        return target.view(size[len(index) :])

    def _place(self, name: str) -> tuple[str, tuple[int, ...]] | None:
        """(name in the checkpoint, leading indices there): equal layers may be saved as one tensor, and so are a layer's experts."""
        for candidate in _spellings(name):
            for key, index in _stackings(candidate):
                if key in self.saved:
                    return key, index
        return None


class _Into(LoadPlanner):
    """Says of each piece read where in `target` it belongs."""

    def __init__(self, target: Tensor):
        self.target = target

    def set_up_planner(self, *_: Any, **__: Any) -> None: ...

    def create_local_plan(self) -> LoadPlan:
        raise NotImplementedError("the plan is made by SavedTensors")

    def create_global_plan(self, global_plan: list[LoadPlan]) -> list[LoadPlan]:
        return global_plan

    def finish_plan(self, central_plan: LoadPlan) -> LoadPlan:
        return central_plan

    def load_bytes(self, read_item: ReadItem, value: Any) -> None:
        raise AssertionError(f"{read_item.dest_index.fqn} is no tensor")

    def resolve_tensor(self, read_item: ReadItem) -> Tensor:
        part = self.target
        for dim, (start, length) in enumerate(zip(read_item.dest_offsets, read_item.lengths, strict=True)):
            part = part.narrow(dim, start, length)
        return part

    def commit_tensor(self, read_item: ReadItem, tensor: Tensor) -> None: ...


def _spellings(name: str) -> Iterator[str]:
    yield name
    for ours, saved in FUSED_NORMS.items():
        if name.endswith("." + ours):
            yield name.removesuffix(ours) + saved


def _stackings(name: str) -> Iterator[tuple[str, tuple[int, ...]]]:
    index: tuple[int, ...] = ()
    if expert := re.search(r"\.local_experts\.(\d+)\.", name):
        name, index = name.replace(expert[0], ".experts."), (int(expert[1]),)
    yield name, index
    if layer := re.match(r"decoder\.layers\.(\d+)\.", name):
        yield name.replace(layer[0], "decoder.layers.", 1), (int(layer[1]), *index)
