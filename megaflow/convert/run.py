"""Do a conversion: beside its target, in files that are kept when it is interrupted, by one process or several that share the files out."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Any

from megaflow.checkpoint.manifest import FileEntry, measure
from megaflow.convert.jobs import Job, Target
from megaflow.convert.sources import Source
from megaflow.convert.tensorfile import Writer
from megaflow.types import ConfigError, PreflightError, UserError
from megaflow.weights.folder import copy_rest, say_dtype
from megaflow.weights.table import Row

NOTES = ".convert"  # within the partial folder: what is done so far
SMALL_FILES = 64 << 20  # bytes allowed for configuration and tokenizer
START_S = 600.0  # how long other ranks wait for rank 0 to begin
Progress = Callable[[int], None]  # bytes done


@dataclass(frozen=True)
class Ranks:
    """Which of how many processes this is. They meet in files only: no group, no ports."""

    rank: int = 0
    world: int = 1


def convert(source: Source, target: Target, destination: Path, ranks: Ranks, progress: Progress) -> int:
    """Write `destination`, keeping the files that an interrupted run of the same conversion finished. Returns their number.

    Raises ConfigError when the destination exists or another conversion was interrupted there, PreflightError when a file of the source is
    damaged or the disk is too small, UserError when it cannot be written.
    """
    check_free(destination)
    work = _Work(source, target, destination.with_name(destination.name + ".partial"), ranks)
    try:
        work.begin()
        num_kept = work.do(progress)
        if ranks.rank == 0:
            work.await_others()
            work.finish(destination)
    except OSError as e:
        kept = "what is finished there is kept: the same command goes on from it" if work.has_finished else "no file of it is finished yet"
        raise UserError(f"{e.filename or work.part}: {e.strerror or e}; {kept}") from e
    return num_kept


def check_free(destination: Path) -> None:
    """Raises ConfigError when there is something of that name, be it a link to nothing: the last rename would fail on it."""
    if os.path.lexists(destination):
        to = f" (a link to {os.readlink(destination)})" if destination.is_symlink() else ""
        raise ConfigError(f"{destination} exists{to} and is not overwritten; remove it or give another name")


class _Work:
    """Locks are the system's (flock): they go with the process, however that ends."""

    def __init__(self, source: Source, target: Target, part: Path, ranks: Ranks):
        self.source, self.target, self.part, self.ranks = source, target, part, ranks
        self.notes = part / NOTES
        self._held: list[IO[str]] = []

    def begin(self) -> None:
        """Rank 0 makes the folder, clears what earlier processes said of themselves, and holds the lock `go`, for which the others wait."""
        plan = json.loads(json.dumps({"source": str(self.source.path.resolve()), "content": self.source.identity(), **self.target.says}))
        if self.ranks.rank > 0:
            self._await_go()
            self._check_plan(plan)
            return
        if not self.notes.exists():
            self._make()
        self._lock("alone", fcntl.LOCK_EX | fcntl.LOCK_NB)
        if not self._plan_file.exists():
            _write_whole(self._plan_file, plan)
        self._check_plan(plan)
        for stale in self.notes.glob("done_*"):
            stale.unlink()
        self._lock("go", fcntl.LOCK_EX)

    def _lock(self, name: str, kind: int) -> None:
        handle = (self.notes / name).open("w")
        self._held.append(handle)
        try:
            fcntl.flock(handle, kind)
        except BlockingIOError as e:
            raise ConfigError(f"{self.part}: another process is at work on it; wait for it or end it") from e

    def _await_go(self) -> None:
        end = time.monotonic() + START_S
        while not _is_locked(self.notes / "go"):
            if time.monotonic() > end:
                text = "has rank 0 ended, and do all hosts share this file system?"
                raise UserError(f"{self.part}: rank 0 has not begun within {START_S:.0f} s: {text}")
            time.sleep(0.1)

    def _check_plan(self, plan: dict[str, Any]) -> None:
        found = json.loads(self._plan_file.read_text())
        if different := sorted(key for key in plan.keys() | found.keys() if plan.get(key) != found.get(key)):
            raise ConfigError(
                f"{self.part} is of an interrupted conversion with another {' and '.join(different)}. Give what it was given to go on "
                f"with it, or remove it: rm -r {self.part}"
            )

    @property
    def _plan_file(self) -> Path:
        return self.notes / "plan.json"

    def _make(self) -> None:
        """The folder, if there is room for what will lie in it. Made first: where nothing can be made, free space says nothing."""
        path = self.notes.absolute()
        try:
            new = next((p for p in reversed(path.parents) if not p.exists()), path)
            path.mkdir(parents=True)
        except OSError as e:
            raise UserError(f"{self.part} cannot be made: {e.filename}: {e.strerror}; nothing was written") from e
        needed, free = sum(job.nbytes for job in self.target.jobs) + SMALL_FILES, shutil.disk_usage(self.part).free
        if free < needed:
            shutil.rmtree(new)
            raise PreflightError(f"{self.part}: {needed / 1e9:.2f} GB are needed, {free / 1e9:.2f} GB are free on that disk")

    @property
    def has_finished(self) -> bool:
        return any(self.notes.glob("job_*.json"))

    def do(self, progress: Progress) -> int:
        """This rank's share: check files of the source, write files of the target. Returns how many were there."""
        rank, world = self.ranks.rank, self.ranks.world
        if found := self.source.damaged(rank, world):
            raise PreflightError("\n".join(found))
        num_kept = 0
        for number in range(rank, len(self.target.jobs), world):
            job, note = self.target.jobs[number], self._note(number)
            if note.exists() and self._is_as_noted(note):
                num_kept += len(job.files)
                progress(job.nbytes)
                continue
            files = self._write(job, progress)
            _write_whole(note, {name: asdict(written) for name, written in files.items()})
        _write_whole(self.notes / f"done_{rank}", {})
        return num_kept

    def _is_as_noted(self, note: Path) -> bool:
        files = {self.part / name: FileEntry(**written) for name, written in json.loads(note.read_text()).items()}
        return all(path.is_file() and measure(path) == written for path, written in files.items())

    def _write(self, job: Job, progress: Progress) -> dict[str, FileEntry]:
        writers = [Writer(self.part / name, job.specs) for name in job.files]
        for row in job.rows:
            progress(self._write_row(row, job, writers))
        return {name: writer.close() for name, writer in zip(job.files, writers, strict=True)}

    def _write_row(self, row: Row, job: Job, writers: list[Writer]) -> int:
        """In a function of its own, so that its tensors go before the next row's come. Returns the bytes written."""
        pieces = job.cut(row, self.source.read(row))
        for writer, tensors in zip(writers, pieces, strict=True):
            for tensor in tensors:
                writer.add(tensor)
        return sum(tensor.nbytes for tensors in pieces for tensor in tensors)

    def await_others(self) -> None:
        """Rank 0. torchrun ends all ranks when one fails, so this needs no time limit."""
        for rank in range(self.ranks.world):
            while not (self.notes / f"done_{rank}").exists():
                time.sleep(0.1)

    def finish(self, destination: Path) -> None:
        """Rank 0. The small files, then the name: with it the folder is complete."""
        copy_rest(self.source.rest, self.part)
        if self.source.path != self.source.rest:  # a run may have trained in another dtype than that of the folder it started from
            say_dtype(self.part, self.target.jobs[0].specs[0].dtype, self.source.shape.tied)
        files = {name: entry for n in range(len(self.target.jobs)) for name, entry in json.loads(self._note(n).read_text()).items()}
        if (index := self.target.index(files)) is not None:
            _write_whole(self.part / index[0], index[1])
        _sync(self.part)
        self.part.rename(destination)
        _sync(destination.parent)
        shutil.rmtree(destination / NOTES)

    def _note(self, number: int) -> Path:
        return self.notes / f"job_{number:05}.json"


def _is_locked(file: Path) -> bool:
    if not file.exists():
        return False
    with file.open() as handle:
        try:
            fcntl.flock(handle, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False


def _write_whole(path: Path, content: Any) -> None:
    """Nobody sees half of it."""
    new = path.with_name(f"{path.name}.{os.getpid()}.new")
    with new.open("w") as f:
        json.dump(content, f, indent=1)
        f.flush()
        os.fsync(f.fileno())
    os.replace(new, path)


def _sync(directory: Path) -> None:
    handle = os.open(directory, os.O_RDONLY)
    os.fsync(handle)
    os.close(handle)
