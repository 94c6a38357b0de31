"""The rank's end of an engine: starts its host process (engine_host.py), calls it, and notices a death or a hang and names it."""

from __future__ import annotations

import contextlib
import itertools
import os
import queue
import subprocess
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future
from dataclasses import dataclass
from multiprocessing.connection import Pipe
from typing import Any, NoReturn

import numpy as np
import torch

from megaflow.config.schema import Config
from megaflow.monitor.progress import mark
from megaflow.parallel import device
from megaflow.rollout.base import EngineError, EngineLost
from megaflow.rollout.engine_env import engine_environment
from megaflow.rollout.engine_host import Order, scoring_memory
from megaflow.rollout.host_process import kill_session, start_host
from megaflow.rollout.scratch import Scratch

CONTROL_TIMEOUT_S = 90.0  # of sleep and wake: the engine finishes its last batch first
PING_S = 15.0  # an idle engine answers within milliseconds; on a busy machine one that is well must not be taken for lost


@dataclass(frozen=True)
class Answer:
    """One generated sequence. finish: stop, length or abort (then `text` says why); routes: as in types.Sample, if asked for."""

    index: int  # of its request
    tokens: torch.Tensor  # [R] int64
    logps: torch.Tensor  # [R] fp32
    finish: str
    text: str
    routes: torch.Tensor | None = None


@dataclass(frozen=True)
class EngineChild:
    """A process of the engine, not our own child."""

    pid: int


class EngineProcess:
    """One sglang.Engine in a process of its own. Starting it returns at once; `await_start` waits.

    processes  its schedulers
    asleep     what it has given back: "weights", "kv_cache"
    seconds    of its start, by part; since the start of the host process: "total", and "first_token" once there was one
    """

    def __init__(self, config: Config, number: int, name: str, scores: bool = False):
        """From the main thread: the host ends with the thread that starts it. number: among its likes; scores: see engine_host.Order."""
        self.name, self.timeout_s, self.start_timeout_s = name, config.rollout.timeout_s, config.rollout.start_timeout_s
        self.processes: list[EngineChild] = []
        self.seconds: dict[str, float] = {}
        self.kv_tokens = 0
        self.asleep = set(scoring_memory(device.on_cuda())) if scores else set()
        self.dead = ""
        self._lock = threading.RLock()  # of what follows: three threads learn of a death
        self._calls: dict[int, Future] = {}
        self._answers: dict[int, queue.SimpleQueue] = {}
        self._numbers = itertools.count()
        self._started: Future = Future()
        self._began = time.time()
        self._scratch = Scratch()
        self._pipe, theirs = Pipe()
        self.host = start_host(theirs.fileno(), engine_environment(config, number, str(self._scratch.path)))
        theirs.close()
        self._outbox: queue.SimpleQueue = queue.SimpleQueue()
        self._outbox.put(_order(config, scores))
        for work in (self._listen, self._speak):
            threading.Thread(target=work, name="engine", daemon=True).start()

    # --- the other end ----------------------------------------------------------------------------------------------

    def _speak(self) -> None:
        """In a thread: a pipe to a host that hangs fills up, and the rank must not hang with it."""
        while (message := self._outbox.get()) is not None:
            try:
                self._pipe.send(message)
            except OSError:  # the listening thread sees the end too, and says how it came
                return

    def _listen(self) -> None:
        while True:
            try:
                kind, *rest = self._pipe.recv()
            except (EOFError, OSError):
                self._lose(f"its host process {self.host.pid} died with exit code {self.host.wait()}; its last words are above")
                return
            getattr(self, f"_on_{kind}")(*rest)

    def _on_ready(self, facts: dict[str, Any]) -> None:
        self.processes = [EngineChild(pid) for pid in facts["pids"]]
        self.kv_tokens = facts["kv_tokens"]
        self.seconds = {**facts["seconds"], "total": time.time() - self._began}
        self._started.set_result(None)

    def _on_failed(self, text: str) -> None:
        self._started.set_exception(EngineError(text))

    def _on_first(self, when: float) -> None:
        self.seconds["first_token"] = when - self._began

    def _on_answer(self, call: int, *answer: Any) -> None:
        if (box := self._answers.get(call)) is not None:
            box.put(answer)

    def _on_done(self, call: int, result: Any) -> None:
        if (future := self._calls.pop(call, None)) is not None:  # None: it was given up
            future.set_result(result)

    def _on_error(self, call: int, text: str) -> None:
        self._fail(call, EngineError(f"{self.name}: {text}"))

    def _on_died(self, text: str) -> None:
        self._lose(text)

    def _lose(self, text: str) -> None:
        """It died or hangs: whatever is asked of it, now or later, fails with this."""
        with self._lock:
            self.dead = self.dead or text
            if not self._started.done():
                self._started.set_exception(EngineLost(self.dead))
            for call in list(self._calls):
                self._fail(call, EngineLost(f"{self.name}: {self.dead}"))

    def _fail(self, call: int, error: EngineError) -> None:
        with self._lock:
            if (future := self._calls.pop(call, None)) is not None:
                future.set_exception(error)
        if call in self._answers:
            self._answers[call].put(None)  # wakes who waits for the next answer

    # --- calls ------------------------------------------------------------------------------------------------------

    def await_start(self) -> None:
        """Raises EngineError when the engine did not start, or not within rollout.start_timeout_s; EngineLost when it died."""
        left = self.start_timeout_s - (time.time() - self._began)
        try:
            self._started.result(timeout=max(0.0, left))
        except TimeoutError as e:
            raise EngineError(f"no answer within {self.start_timeout_s:.0f} s (rollout.start_timeout_s)") from e

    def call(self, method: str, *arguments: Any, answers: queue.SimpleQueue | None = None) -> Future:
        """Start `method` of engine_host.Host. The future raises EngineError when the engine refuses, EngineLost when it dies."""
        self.require_alive()
        number, future = next(self._numbers), Future()
        if answers is not None:
            self._answers[number] = answers
        with self._lock:
            self._calls[number] = future
        self._outbox.put((number, method, arguments))
        if self.dead:  # it died just now, before the listening thread knew of this call
            self._lose(self.dead)
        return future

    def wait(self, future: Future, timeout_s: float, what: str) -> Any:
        """The result. EngineLost when a process of the engine dies, or when nothing comes within timeout_s: then the engine hangs."""
        try:
            return future.result(timeout=timeout_s)
        except TimeoutError:
            self.hangs(what, timeout_s)

    def hangs(self, what: str, timeout_s: float) -> NoReturn:
        self._lose(f"hangs: {what} took more than {timeout_s:.0f} s (rollout.timeout_s)")
        self.require_alive()

    def require_alive(self) -> None:
        if self.dead:
            raise EngineLost(f"{self.name}: {self.dead}")

    def is_well(self) -> bool:
        """No process of it has died, and its scheduler answers."""
        with contextlib.suppress(EngineError):
            self.wait(self.call("ping"), min(PING_S, self.timeout_s), "a sign of life")
        return not self.dead

    def generate(self, requests: list[tuple[list[int], dict[str, Any]]], timeout_s: float, routes: bool = False) -> Iterator[list[Answer]]:
        """Answers as they come, with those that have come at the same time; `routes`: with each token's experts. timeout_s bounds the time
        without one."""
        for answers in self._answers_to("generate", requests, timeout_s, routes):
            yield [self._unpacked(*answer) for answer in answers]

    def score(self, sequences: list[list[int]], timeout_s: float) -> list[float]:
        """One number for each sequence of tokens, of an engine that scores. timeout_s bounds the time without one."""
        by_index = dict(answer for answers in self._answers_to("score", sequences, timeout_s) for answer in answers)
        return [by_index[i] for i in range(len(sequences))]

    def _answers_to(self, method: str, requests: list[Any], timeout_s: float, *more: Any) -> Iterator[list[tuple]]:
        answers: queue.SimpleQueue = queue.SimpleQueue()
        future = self.call(method, requests, *more, answers=answers)
        finished = 0
        while finished < len(requests):
            try:
                come = [answers.get(timeout=timeout_s)]
            except queue.Empty:
                self.hangs(f"request {finished + 1} of {len(requests)}", timeout_s)
            with contextlib.suppress(queue.Empty):
                while True:
                    come.append(answers.get_nowait())
            good = [answer for answer in come if answer is not None]
            finished += len(good)
            if good:  # before the error, so that they need not be made again
                mark(f"{self.name}, request", finished, len(requests))
                yield good
            if len(good) < len(come):
                future.result()
        self.wait(future, timeout_s, "the last answer")
        self._answers = {number: box for number, box in self._answers.items() if box is not answers}

    def _unpacked(self, index: int, tokens: bytes, logps: bytes, finish: str, text: str, routes: np.ndarray | None) -> Answer:
        if finish == "abort":
            raise EngineError(f"{self.name} refused a request: {text}")
        ids, numbers = np.frombuffer(bytearray(tokens), np.int64), np.frombuffer(bytearray(logps), np.float32)
        if len(ids) != len(numbers):
            raise EngineError(f"{self.name} gave {len(numbers)} log-probabilities for {len(ids)} tokens")
        chosen = None if routes is None else torch.from_numpy(routes)
        return Answer(index, torch.from_numpy(ids), torch.from_numpy(numbers), finish, text, chosen)

    def load_weights(self, message: str) -> Future:
        """`message` goes to our loader in the schedulers; the future is done when all of them are."""
        return self.call("load_weights", message)

    def update_weights(self, serialized: list[Any], load_format: str | None, flush: bool) -> Future:
        """SGLang's own update_weights_from_tensor with one payload for each tp rank, for comparison."""
        return self.call("update_weights", serialized, load_format, flush)

    def release(self, tags: list[str]) -> None:
        """Give back the memory of those of `tags` that it holds."""
        if wanted := [tag for tag in tags if tag not in self.asleep]:
            self._control("release", wanted, "sleep")
            self.asleep |= set(wanted)

    def resume(self, tags: list[str]) -> None:
        if wanted := [tag for tag in tags if tag in self.asleep]:
            self._control("resume", wanted, "wake")
            self.asleep -= set(wanted)

    def _control(self, method: str, tags: list[str], what: str) -> None:
        self.wait(self.call(method, tags), min(CONTROL_TIMEOUT_S, self.timeout_s), what)

    def close(self) -> None:
        """End the engine's processes; it leaves in an orderly way within 15 s, or is killed."""
        self._pipe_shutdown()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.host.wait(timeout=0 if self.dead else 15)
        self.kill()

    def kill(self) -> None:
        """End whatever is left of it, in whatever state; returns when that is gone."""
        self._lose("it was ended")
        kill_session(self.host)
        self._outbox.put(None)
        self._scratch.remove()

    def _pipe_shutdown(self) -> None:
        """The host sees the end of the connection. Closing alone would not do: our listening thread holds it open."""
        import socket

        with contextlib.suppress(OSError), socket.socket(fileno=os.dup(self._pipe.fileno())) as end:
            end.shutdown(socket.SHUT_RDWR)


def _order(config: Config, scores: bool) -> Order:
    return Order(config, device.device().index if device.on_cuda() else -1, device.total_bytes(), scores)
