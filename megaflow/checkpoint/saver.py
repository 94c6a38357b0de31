"""When a run's checkpoints are written: at once, or by a thread of each rank while training goes on."""

from __future__ import annotations

import threading
import time
from pathlib import Path

from megaflow.checkpoint.directory import Retention
from megaflow.checkpoint.saving import Content, Saved, Writing, save
from megaflow.checkpoint.staging import HostMemory
from megaflow.monitor.progress import mark
from megaflow.parallel import device
from megaflow.parallel.mesh import Mesh


class Saver:
    """One for a run, on every rank. At most one checkpoint is on its way.

    A rank's thread writes and fsyncs its own files and knows no process group. That a checkpoint is whole is agreed on by all ranks'
    main threads, in `poll` and `settle`: only then it gets its manifest and its name. An error of a thread is raised there, on every rank.

    waited_s   seconds that the last `save` waited for the one before it
    """

    def __init__(self, mesh: Mesh, directory: Path, retention: Retention, in_background: bool):
        self.mesh, self.directory, self.retention, self.in_background = mesh, directory, retention, in_background
        self.waited_s = 0.0
        self._memory = HostMemory(is_pinned=device.on_cuda())
        self._writing: Writing | None = None
        self._thread: threading.Thread | None = None

    @property
    def is_writing(self) -> bool:
        """Whether there is a checkpoint on its way; the same on every rank."""
        return self._writing is not None

    def save(self, content: Content) -> list[Saved]:
        """Collective. Returns what is whole when it returns: this checkpoint, or with `in_background` the one before, which it waits for.

        Raises UserError on every rank when the disk is full or cannot be written, also for the one before.
        """
        start = time.perf_counter()
        before = self.settle()
        self.waited_s = time.perf_counter() - start if before else 0.0
        if not self.in_background:
            return [*before, save(self.directory, content, self.mesh, self.retention)]
        self._memory.reset()
        self._writing = Writing.begin(self.directory, content, self.mesh, self._memory, is_copied=True)
        # not a daemon: those are cut off within C++ when the interpreter ends, and take the exit code with them
        self._thread = threading.Thread(target=self._writing.write, name="checkpoint", daemon=False)
        self._thread.start()
        return before

    def poll(self) -> list[Saved]:
        """Collective. The checkpoint on its way, if all ranks have written their files; does not wait."""
        if self._writing is None or self._thread is None:
            return []
        is_over, has_failed = not self._thread.is_alive(), self._writing.error is not None
        votes = self.mesh.all_gather((is_over, is_over and has_failed))
        return self.settle() if all(over for over, _ in votes) or any(failed for _, failed in votes) else []

    def settle(self) -> list[Saved]:
        """Collective. The checkpoint on its way, waited for."""
        if self._writing is None or self._thread is None:
            return []
        writing, self._writing = self._writing, None
        self._join(writing)
        return [writing.complete(self.retention)]

    def _join(self, writing: Writing) -> None:
        """Wait for this rank's thread. Tensors that it writes meanwhile are signs of progress, a disk that hangs gives none."""
        assert self._thread is not None
        seen = -1
        while self._thread.is_alive():
            if writing.shards.num_written != seen:
                seen = writing.shards.num_written
                mark("files of checkpoint", seen)
            self._thread.join(1.0)
