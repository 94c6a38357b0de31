"""Save a checkpoint: written beside the good ones, named when it is whole. A kill at any moment leaves the last good one usable."""

from __future__ import annotations

import contextlib
import importlib.metadata
import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

import megaflow
from megaflow.checkpoint import directory as names
from megaflow.checkpoint import manifest
from megaflow.checkpoint.shards import ShardWriter
from megaflow.checkpoint.state import Trainable, counters, layout, model_facts, num_bytes, rng_state, sharded_state
from megaflow.parallel.mesh import Mesh
from megaflow.types import UserError

META = "meta.json"
SMALL_FILES = 1 << 20  # bytes allowed for the index, random states and the like


def rng_file(rank: int) -> str:
    return f"rng_{rank}.pt"


def save(
    directory: Path, step: int, trainable: Trainable, mesh: Mesh, extra: dict[str, Any], keep_last: int, critic: Trainable | None = None
) -> Path:
    """Collective. Save everything that going on bit for bit needs, then delete all but the `keep_last` newest. Returns its path.

    extra  JSON values that `load` gives back; rank 0's count
    The trainable must be awake; the critic is woken for as long as it takes. `directory` must be on a file system that all hosts share.
    Raises UserError on every rank when the disk is full or cannot be written; the checkpoints that exist stay as they are.
    """
    part = Path(directory) / f"{names.name_of(step)}.part"
    mesh.on_rank0(_begin, part)
    try:
        with contextlib.nullcontext() if critic is None else critic.awake():
            files = _write_all(part, trainable, mesh, critic)
        meta = {"step": step, "extra": extra, **counters(trainable)}
        if critic is not None:
            meta["critic"] = {"model": model_facts(critic), **counters(critic)}
        content = manifest.Manifest(manifest.FORMAT, step, layout(mesh), model_facts(trainable), _versions(), files)
        return mesh.on_rank0(_complete, part, content, meta, keep_last)
    except Exception:
        if mesh.rank == 0 and part.exists():
            names.remove(part)
        raise


def _begin(part: Path) -> None:
    with _disk_errors(part):
        names.begin(part)


def _write_all(part: Path, trainable: Trainable, mesh: Mesh, critic: Trainable | None) -> dict[str, manifest.FileEntry]:
    """Collective. All files but those of `_complete`; each rank measures what it wrote, while the system still has it in memory."""
    state = sharded_state(trainable, critic)
    needed = sum(mesh.all_gather(num_bytes(state)))
    mesh.on_rank0(_check_space, part, needed)
    writer = ShardWriter()
    writer.plan(state, part, mesh)
    with mesh.together(), _disk_errors(part, needed):
        results, written = _write_own(part, writer, mesh.rank)
    everything = mesh.all_gather((results, written))
    mesh.on_rank0(_write_index, part, writer, [r for r, _ in everything])
    return {name: entry for _, files in everything for name, entry in files.items()}


def _write_own(part: Path, writer: ShardWriter, rank: int) -> tuple[list[Any], dict[str, manifest.FileEntry]]:
    results = writer.write()
    own = part / rng_file(rank)
    with own.open("wb") as f:
        torch.save(rng_state(), f)
        f.flush()
        os.fsync(f.fileno())
    paths = [own, *part.glob(f"__{rank}_*.distcp")]  # the name that Megatron gives to rank's files
    return results, {path.name: manifest.measure(path) for path in paths}


def _write_index(part: Path, writer: ShardWriter, results: list[list[Any]]) -> None:
    with _disk_errors(part):
        writer.finish(results)


def _complete(part: Path, content: manifest.Manifest, meta: dict[str, Any], keep_last: int) -> Path:
    """Rank 0. The small files, the manifest over all of them, the name; then the old ones go."""
    with _disk_errors(part):
        manifest.write_durably(part / META, json.dumps(meta, indent=1).encode())
        present = {path.name for path in part.iterdir()}
        unseen = content.files.keys() - present
        if unseen:
            raise UserError(
                f"{part}: {len(unseen)} files that other ranks wrote are not visible on the host of rank 0, e.g. {min(unseen)}; "
                "run.root must be on a file system that all hosts share"
            )
        content.files.update({name: manifest.measure(part / name) for name in present - content.files.keys()})
        manifest.write(part, content)
        final = names.publish(part, content.step)
    names.rotate(final.parent, content.step, keep_last)
    return final


def _check_space(part: Path, needed: int) -> None:
    free = shutil.disk_usage(part).free
    if free < needed + SMALL_FILES:
        raise UserError(
            f"{part}: a checkpoint needs {_gb(needed)}, {_gb(free)} are free on that disk; nothing was written and earlier checkpoints "
            "are untouched. Free some space, lower run.keep_last, or set run.root to another disk"
        )


@contextmanager
def _disk_errors(part: Path, needed: int | None = None) -> Iterator[None]:
    """What the disk refuses is an error for a person; anything else stays what it is."""
    try:
        yield
    except Exception as error:
        reason = _disk_reason(error)
        if reason is None:
            raise
        done = sum(path.stat().st_size for path in part.glob("*")) if part.is_dir() else 0
        size = f" of {needed:,}" if needed else ""
        free = f", {_gb(shutil.disk_usage(part.parent).free)} are free on that disk" if part.parent.is_dir() else ""
        raise UserError(
            f"{part}: writing the checkpoint failed after {done:,}{size} bytes: {reason}{free}. The half-written directory is removed and "
            "earlier checkpoints are untouched. Free some space, lower run.keep_last, or set run.root to another disk"
        ) from error


def _disk_reason(error: BaseException | None) -> str | None:
    """The system's words, found behind what the libraries made of them; None: it was not the disk."""
    text = None
    while error is not None:
        if isinstance(error, OSError):
            return f"{error.strerror or error}" + (f" ({error.filename})" if error.filename else "")
        if isinstance(error, RuntimeError) and ("PytorchStreamWriter" in str(error) or "inline_container" in str(error)):
            text = "a write came up short"  # torch.save says no more
        error = error.__cause__ or error.__context__
    return text


def _gb(size: int) -> str:
    return f"{size / 1e9:.2f} GB ({size:,} bytes)"


def _versions() -> dict[str, str]:
    return {"megaflow": megaflow.__version__} | {name: importlib.metadata.version(name) for name in ("torch", "megatron-core")}
