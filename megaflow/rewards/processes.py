"""Worker processes, one pipe each: an item's time is watched, and the process that overruns or dies is replaced without harm to the others.

An own pool, because none that we know does this: those of the standard library cannot kill the one worker that overruns, and pebble 5.2's
breaks for good when an idle worker dies, and shares one lock among workers, which a dying one may hold.
Processes are started afresh, not forked (the trainer holds CUDA and threads), and do not import the main script.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import signal
import subprocess
import sys
import time
from collections import deque
from multiprocessing.connection import Pipe, wait

from megaflow.monitor.progress import mark
from megaflow.rewards.worker import Outcome, Spec
from megaflow.types import ConfigError, Prompt, UserError

START_LIMIT_S = 120.0  # for a worker's start, with the imports of the reward functions
MAX_CHUNK = 16  # items sent at once, so that a quick function does not wait for the pipe
# What torchrun sets. A reward function that looks at these, or a library that does, would take itself for a rank.
DISTRIBUTED = ("RANK", "WORLD_SIZE", "LOCAL_", "GROUP_", "ROLE_", "MASTER_", "TORCHELASTIC_")

Item = tuple[str, Prompt, bool]  # response, prompt, whether the answer that the response gives is asked for too


class Worker:
    """One process and our end of its pipe. A message that comes in restarts the clock."""

    def __init__(self, spec: Spec, limit_s: float):
        self.pipe, theirs = Pipe()
        code = f"from megaflow.rewards.worker import serve; serve({theirs.fileno()}, {os.getpid()})"
        self.process = subprocess.Popen(  # in a session of its own: Ctrl-C is the trainer's to handle, and what it starts is killed with it
            [sys.executable, "-P", "-c", code],
            pass_fds=(theirs.fileno(),),
            env=_environment(),
            stdin=subprocess.DEVNULL,
            start_new_session=True,
        )
        theirs.close()
        self.pipe.send(spec)
        self.limit_s = limit_s
        self.tasks: deque[int] = deque()  # numbers of the items it has, the one it works on first
        self.ready = self.tells_answers = False  # the second: the first function has a `find_answer`
        self.deadline = time.monotonic() + START_LIMIT_S

    @property
    def idle(self) -> bool:
        return self.ready and not self.tasks

    def give(self, chunk: list[tuple[int, bytes]]) -> None:
        """Raises OSError if the process is gone."""
        self.pipe.send(chunk)
        self.tasks.extend(number for number, _ in chunk)
        self.restart_clock()

    def restart_clock(self) -> None:
        self.deadline = time.monotonic() + self.limit_s

    def end(self) -> int:
        """Kills it and what it has started; its exit code (its own, had it ended before), negative for a signal."""
        self.pipe.close()
        if self.process.returncode is None:  # not reaped yet, so the number is still its own, and its session's
            with contextlib.suppress(ProcessLookupError):  # nobody is left
                os.killpg(self.process.pid, signal.SIGKILL)
        return self.process.wait()


class Workers:
    """`number` workers that have loaded the functions of `spec`. ConfigError when these cannot be used.

    They end with the thread that starts them (Linux takes that for their parent), so use it from the main thread.
    """

    def __init__(self, spec: Spec, number: int, limit_s: float):
        self._spec, self._limit_s = spec, limit_s
        self._todo: deque[int] = deque()
        self._outcomes: dict[int, Outcome] = {}
        self._workers = [Worker(spec, limit_s) for _ in range(number)]
        try:
            while not all(worker.ready for worker in self._workers):
                self._watch()
            self.tells_answers = self._workers[0].tells_answers
        except UserError as error:
            self.close()
            raise ConfigError(str(error)) from error
        except BaseException:
            self.close()
            raise

    def run(self, items: list[Item]) -> list[Outcome]:
        """The outcome of each item. UserError when a worker that replaces another cannot start."""
        assert self._workers, "run() after close()"
        self._outcomes, packed = {}, {}
        for number, item in enumerate(items):
            try:
                packed[number] = pickle.dumps(item)
            except Exception as error:  # pickle has no common class for what it raises
                self._outcomes[number] = Outcome({}, "error", f"cannot be sent to a worker: {error}")
        self._todo = deque(packed)
        try:
            while len(self._outcomes) < len(items):
                self._hand_out(packed)
                self._watch()
                mark("reward", len(self._outcomes), len(items))
        except BaseException:  # the pipes hold answers to questions that nobody will ask again
            self.close()
            raise
        return [self._outcomes[number] for number in range(len(items))]

    def close(self) -> None:
        for worker in self._workers:
            worker.end()
        self._workers = []

    def _hand_out(self, packed: dict[int, bytes]) -> None:
        for worker in [worker for worker in self._workers if worker.idle]:
            if not self._todo:
                return
            size = max(1, min(MAX_CHUNK, len(self._todo) // (2 * len(self._workers))))
            numbers = [self._todo.popleft() for _ in range(min(size, len(self._todo)))]
            try:
                worker.give([(number, packed[number]) for number in numbers])
            except OSError:  # it died while it had nothing to do: no item's fault
                self._todo.extendleft(reversed(numbers))
                self._replace(worker)

    def _watch(self) -> None:
        """Waits for the next message, death or deadline, and deals with it."""
        busy = {worker.pipe: worker for worker in self._workers if not worker.idle}
        first = min((worker.deadline for worker in busy.values()), default=time.monotonic())
        arrived = wait(list(busy), max(0.0, first - time.monotonic()))
        for pipe, worker in busy.items():
            if pipe in arrived:
                self._receive(worker)
            elif time.monotonic() > worker.deadline:
                self._overdue(worker)

    def _receive(self, worker: Worker) -> None:
        try:
            message = worker.pipe.recv()
        except (EOFError, OSError):
            code = worker.end()
            if not worker.ready:
                raise UserError(f"a reward worker died while it loaded the reward functions ({_exit(code)})") from None
            self._fail_first(worker, Outcome({}, "died", f"its worker process died ({_exit(code)})"))
            return
        if not worker.ready:
            error, worker.tells_answers = message
            if error:
                raise UserError(error)
            worker.ready = True
            return
        number, outcome = message
        assert worker.tasks.popleft() == number, number
        self._outcomes[number] = outcome
        worker.restart_clock()

    def _overdue(self, worker: Worker) -> None:
        if not worker.ready:
            raise UserError(f"a reward worker is not ready after {START_LIMIT_S:g} s; does the import of a reward function hang?")
        self._fail_first(worker, Outcome({}, "timeout", f"longer than reward.timeout_s={self._limit_s:g}"))

    def _fail_first(self, worker: Worker, outcome: Outcome) -> None:
        """The item it worked on has failed; those that it had not begun go to others."""
        self._outcomes[worker.tasks.popleft()] = outcome
        self._todo.extendleft(reversed(worker.tasks))
        self._replace(worker)

    def _replace(self, worker: Worker) -> None:
        worker.end()
        self._workers[self._workers.index(worker)] = Worker(self._spec, self._limit_s)


def _exit(code: int) -> str:
    return f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"


def _environment() -> dict[str, str]:
    """Ours without torchrun's; and where Python looks for modules, for it may have been changed since the start."""
    ours = {name: value for name, value in os.environ.items() if not name.startswith(DISTRIBUTED)}
    return {**ours, "PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path)}
