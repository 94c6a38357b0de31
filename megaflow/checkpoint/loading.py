"""Load a checkpoint, after it is verified and found to fit."""

from __future__ import annotations

import contextlib
import json
import logging
import zlib
from pathlib import Path
from typing import Any

import torch
from megatron.core.dist_checkpointing.core import CheckpointingException
from torch.distributed.checkpoint.api import CheckpointException

from megaflow.checkpoint import directory as names
from megaflow.checkpoint import manifest, shards
from megaflow.checkpoint.saving import META, rng_file
from megaflow.checkpoint.staging import HostMemory
from megaflow.checkpoint.state import Trainable, differences, layout, model_facts, restore, set_rng_state, sharded_state
from megaflow.parallel import device
from megaflow.parallel.mesh import Mesh
from megaflow.types import PreflightError

log = logging.getLogger(__name__)


def load(path: Path, trainable: Trainable, mesh: Mesh, critic: Trainable | None = None) -> dict[str, Any]:
    """Collective. Verify the checkpoint at `path`, put it into the trainable, set the random states. Returns what `save` got as `extra`.

    With another number of tensor-, pipeline- or data-parallel ranks than it was saved with, parameters and optimizer state are laid out
    anew; random states then cannot be kept and are seeded from the step, which the log says.
    Raises PreflightError on every rank when it is damaged, of another model, or not one of ours.
    """
    path = Path(path)
    content = mesh.on_rank0(_read_manifest, path)
    mesh.on_rank0(_check_fit, path, content, model_facts(trainable))
    _verify(path, content, mesh)
    meta = mesh.on_rank0(lambda: json.loads((path / META).read_text()))
    if critic is not None:
        mesh.on_rank0(_check_critic, path, meta.get("critic"), model_facts(critic))
    with contextlib.nullcontext() if critic is None else critic.awake():
        loaded = _read_shards(path, trainable, mesh, critic)
        restore(trainable, loaded, meta)
        if critic is not None:
            restore(critic, loaded["critic"], meta["critic"])
    _restore_rng(path, content, mesh)
    return meta["extra"]


def _read_manifest(path: Path) -> manifest.Manifest:
    try:
        return manifest.read(path)
    except FileNotFoundError as error:
        if not path.is_dir():
            raise PreflightError(f"{path}: no such checkpoint (run.resume)") from error
        kind = "a checkpoint of Megatron's that megaflow did not write" if (path / "metadata.json").exists() else "not a checkpoint"
        raise PreflightError(f"{path} is {kind}: it has no {manifest.NAME}; give run.resume a directory step_NNNNNN of a run") from error
    except manifest.BadManifest as error:
        raise PreflightError(f"{error}. {_way_out(path)}") from error


def _check_fit(path: Path, content: manifest.Manifest, present: dict[str, Any]) -> None:
    different = list(differences(content.model, present))
    if different:
        rows = "\n".join(f"  {row}" for row in different)
        raise PreflightError(f"{path} is of another model:\n{rows}\nSet model.path, model.dtype and actor.* as when it was saved")


def _check_critic(path: Path, saved: dict[str, Any] | None, present: dict[str, Any]) -> None:
    if saved is None:
        raise PreflightError(
            f"{path} has no critic, and algo.advantage needs one: it was saved by a run without. Export that run's policy (run.export_hf) "
            "and start from it with model.path, or train the critic first with critic.warmup_steps in a run of its own"
        )
    different = list(differences(saved["model"], present))
    if different:
        rows = "\n".join(f"  {row}" for row in different)
        raise PreflightError(f"{path}: its critic is of another model:\n{rows}\nSet critic.path as when it was saved")


def _verify(path: Path, content: manifest.Manifest, mesh: Mesh) -> None:
    """Collective. Checksums of all files, each rank a part of them."""
    by_size = sorted(content.files, key=lambda name: -content.files[name].bytes)
    found = mesh.all_gather(manifest.damaged(path, content, by_size[mesh.rank :: mesh.world_size]))
    mesh.on_rank0(_refuse_damaged, path, [text for texts in found for text in texts])


def _refuse_damaged(path: Path, found: list[str]) -> None:
    if found:
        raise PreflightError("\n".join(found) + f"\n{_way_out(path)}")


def _way_out(path: Path) -> str:
    earlier = names.previous(path)
    if earlier is None:
        return f"There is no earlier whole checkpoint in {path.parent}"
    return f"The one before it is whole. To go on from there: rm -r {path}, then the same command with run.resume={earlier}"


def _read_shards(path: Path, trainable: Trainable, mesh: Mesh, critic: Trainable | None) -> dict[str, Any]:
    state = sharded_state(trainable, HostMemory(), critic, is_loading=True)
    loaded, error = {}, None
    try:
        loaded = shards.read(state, path)
    except (CheckpointingException, CheckpointException, KeyError) as e:
        error = PreflightError(f"{path} does not fit this model and layout ({layout(mesh)}): {type(e).__name__}: {e}")
        error.__cause__ = e
    mesh.all_ok(error)
    return loaded


def _restore_rng(path: Path, content: manifest.Manifest, mesh: Mesh) -> None:
    if content.layout == layout(mesh):
        set_rng_state(torch.load(path / rng_file(mesh.rank), weights_only=True))
        return
    device.seed_everything(zlib.crc32(f"{content.step} {mesh.rank}".encode()))
    log.warning(
        "%s was saved with %s, this run has %s: parameters and optimizer state are the same, random states are seeded from the step, "
        "so the run goes on in another way than an undisturbed one",
        path, content.layout, layout(mesh),
    )  # fmt: skip
