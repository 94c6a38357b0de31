"""Save a checkpoint: written beside the good ones, named when it is whole. A kill at any moment leaves the last good one usable."""

from __future__ import annotations

import contextlib
import importlib.metadata
import json
import os
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

import megaflow
from megaflow.checkpoint import directory as names
from megaflow.checkpoint import manifest
from megaflow.checkpoint.shards import ShardWriter
from megaflow.checkpoint.staging import HostMemory
from megaflow.checkpoint.state import Trainable, counters, layout, model_facts, num_bytes, rng_state, sharded_state
from megaflow.monitor.progress import mark
from megaflow.parallel.mesh import Mesh
from megaflow.types import UserError

META = "meta.json"
SMALL_FILES = 1 << 20  # bytes allowed for the index, random states and the like


def rng_file(rank: int) -> str:
    return f"rng_{rank}.pt"


@dataclass(frozen=True)
class Content:
    """What a checkpoint is of. critic: woken for as long as it is read. extra: JSON values that `load` gives back. scores: of the
    policy by metric, to tell the best by. Rank 0's extra and scores count."""

    step: int
    trainable: Trainable
    extra: dict[str, Any]
    critic: Trainable | None = None
    scores: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Saved:
    """A checkpoint that is whole. num_bytes of all ranks' tensors; best: what Retention says is the best there is now."""

    step: int
    path: Path
    num_bytes: int
    write_s: float  # of the slowest rank
    best: names.Best | None


def save(directory: Path, content: Content, mesh: Mesh, retention: names.Retention) -> Saved:
    """Collective. Save everything that going on bit for bit needs, then delete what `retention` does not keep.

    The trainable must be awake. `directory` must be on a file system that all hosts share.
    Raises UserError on every rank when the disk is full or cannot be written; the checkpoints that exist stay as they are.
    """
    writing = Writing.begin(directory, content, mesh, HostMemory(), is_copied=False)
    mark("files of checkpoint", content.step)
    writing.write()
    mark("manifest of checkpoint", content.step)
    return writing.complete(retention)


class Writing:
    """A checkpoint on its way: `begin` takes it down, `write` may run beside training, `complete` gives it its name."""

    @classmethod
    def begin(cls, directory: Path, content: Content, mesh: Mesh, memory: HostMemory, is_copied: bool) -> Writing:
        """Collective. is_copied: the state is copied to `memory`, so that it may change as soon as this returns.

        Raises UserError on every rank when there is no room for it; nothing is written then.
        """
        writing = cls()
        writing.step, writing.mesh = content.step, mesh
        writing.part = Path(directory) / f"{names.name_of(content.step)}.part"
        mesh.on_rank0(_begin, writing.part)
        with _removed_if_it_fails(writing.part, mesh), contextlib.nullcontext() if content.critic is None else content.critic.awake():
            writing._take_down(content, memory, is_copied)
        return writing

    def _take_down(self, content: Content, memory: HostMemory, is_copied: bool) -> None:
        """Collective. All that will be written, as it is now."""
        state = sharded_state(content.trainable, memory, content.critic)
        self.needed = sum(self.mesh.all_gather(num_bytes(state)))
        self.mesh.on_rank0(_check_space, self.part, self.needed)
        self.shards = ShardWriter()
        mark("plan of checkpoint", self.step)
        self.shards.plan(state, self.part, self.mesh)
        if is_copied:
            self.shards.stage(memory)
        self.rng = rng_state()
        meta = {"step": self.step, "extra": content.extra, **counters(content.trainable)}
        if content.critic is not None:
            meta["critic"] = {"model": model_facts(content.critic), **counters(content.critic)}
        self.meta = json.dumps(meta, indent=1).encode()
        self.facts = {"layout": layout(self.mesh), "model": model_facts(content.trainable), "scores": content.scores}
        self.error: Exception | None = None
        self.results: list[Any] = []
        self.files: dict[str, manifest.FileEntry] = {}
        self.seconds = 0.0

    def write(self) -> None:
        """This rank's files, each measured while the system still has it in memory. Nothing here is collective, and nothing is raised."""
        start = time.perf_counter()
        try:
            self.results = self.shards.write()
            own = self.part / rng_file(self.mesh.rank)
            with own.open("wb") as f:
                torch.save(self.rng, f)
                f.flush()
                os.fsync(f.fileno())
            paths = [own, *self.part.glob(f"__{self.mesh.rank}_*.distcp")]  # the name that Megatron gives to rank's files
            self.files = {path.name: manifest.measure(path) for path in paths}
        except Exception as error:  # for `complete`, which brings it to every rank
            self.error = error
        self.seconds = time.perf_counter() - start

    def complete(self, retention: names.Retention) -> Saved:
        """Collective, after `write` has returned. Raises what any rank met while writing, on every rank."""
        with _removed_if_it_fails(self.part, self.mesh):
            with self.mesh.together(), _disk_errors(self.part, self.needed):
                if self.error is not None:
                    raise self.error
            everything = self.mesh.all_gather((self.results, self.files, self.seconds))
            files = {name: entry for _, written, _ in everything for name, entry in written.items()}
            final, best = self.mesh.on_rank0(self._complete, [results for results, _, _ in everything], files, retention)
        return Saved(self.step, final, self.needed, max(seconds for _, _, seconds in everything), best)

    def _complete(
        self, results: list[list[Any]], files: dict[str, manifest.FileEntry], retention: names.Retention
    ) -> tuple[Path, names.Best | None]:
        """Rank 0. The index, the small files, the manifest over all of them, the name; then what is not kept goes."""
        content = manifest.Manifest(manifest.FORMAT, self.step, versions=_versions(), files=files, **self.facts)
        with _disk_errors(self.part):
            self.shards.finish(results)
            manifest.write_durably(self.part / META, self.meta)
            present = {path.name for path in self.part.iterdir()}
            unseen = files.keys() - present
            if unseen:
                raise UserError(
                    f"{self.part}: {len(unseen)} files that other ranks wrote are not visible on the host of rank 0, e.g. {min(unseen)}; "
                    "run.root must be on a file system that all hosts share"
                )
            files.update({name: manifest.measure(self.part / name) for name in present - files.keys()})
            manifest.write(self.part, content)
            final = names.publish(self.part, self.step)
        return final, names.rotate(final.parent, self.step, retention)


@contextmanager
def _removed_if_it_fails(part: Path, mesh: Mesh) -> Iterator[None]:
    try:
        yield
    except Exception:
        if mesh.rank == 0 and part.exists():
            names.remove(part)
        raise


def _begin(part: Path) -> None:
    with _disk_errors(part):
        names.begin(part)


def _check_space(part: Path, needed: int) -> None:
    with _disk_errors(part, needed):
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
