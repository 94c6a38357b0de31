"""The rank's end of an engine: starts its host process (engine_host.py), calls it, and notices a death or a hang and names it."""

from __future__ import annotations

import contextlib
import itertools
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future
from dataclasses import dataclass
from multiprocessing.connection import Pipe
from typing import Any

import numpy as np
import torch

from megaflow.config.schema import Config
from megaflow.parallel import device
from megaflow.rollout.base import EngineError
from megaflow.rollout.engine_env import engine_environment
from megaflow.rollout.engine_host import Order

CONTROL_TIMEOUT_S = 90.0  # of sleep and wake: the engine finishes its last batch first


@dataclass(frozen=True)
class Answer:
    """One generated sequence. finish: stop, length or abort (then `text` says why)."""

    index: int  # of its request
    tokens: torch.Tensor  # [R] int64
    logps: torch.Tensor  # [R] fp32
    finish: str
    text: str


@dataclass(frozen=True)
class EngineChild:
    """A process of the engine, not our own child."""

    pid: int


class EngineProcess:
    """One sglang.Engine in a process of its own. Starting it returns at once; `await_start` waits.

    processes  its schedulers
    seconds    of its start, by part; since the start of the host process: "total", and "first_token" once there was one
    """

    def __init__(self, config: Config, number: int, name: str, scores: bool = False):
        """From the main thread: the host ends with the thread that starts it. number: among its likes; scores: see engine_host.Order."""
        self.name, self.timeout_s = name, config.rollout.start_timeout_s
        self.processes: list[EngineChild] = []
        self.seconds: dict[str, float] = {}
        self.kv_tokens = 0
        self.dead = ""
        self._calls: dict[int, Future] = {}
        self._answers: dict[int, queue.SimpleQueue] = {}
        self._numbers = itertools.count()
        self._started: Future = Future()
        self._began = time.time()
        self._pipe, theirs = Pipe()
        code = f"from megaflow.rollout.engine_host import serve; serve({theirs.fileno()}, {os.getpid()})"
        self.host = subprocess.Popen(  # in a session of its own: Ctrl-C and torchrun's SIGTERM are the trainer's to handle
            [sys.executable, "-P", "-c", code],
            pass_fds=(theirs.fileno(),),
            env=engine_environment(config, number),
            stdin=subprocess.DEVNULL,
            start_new_session=True,
        )
        theirs.close()
        self._pipe.send(_order(config, scores))
        threading.Thread(target=self._listen, name="engine", daemon=True).start()

    # --- the other end ----------------------------------------------------------------------------------------------

    def _listen(self) -> None:
        while True:
            try:
                kind, *rest = self._pipe.recv()
            except (EOFError, OSError):
                self._die(f"its host process {self.host.pid} died with exit code {self.host.wait()}; its last words are above")
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
        self._answers[call].put(answer)

    def _on_done(self, call: int, result: Any) -> None:
        self._calls.pop(call).set_result(result)

    def _on_error(self, call: int, text: str) -> None:
        self._fail(self._calls.pop(call), call, f"{self.name}: {text}")

    def _on_died(self, text: str) -> None:
        self._die(text)

    def _die(self, text: str) -> None:
        self.dead = self.dead or text
        if not self._started.done():
            self._started.set_exception(EngineError(text))
        for call in list(self._calls):
            self._fail(self._calls.pop(call), call, f"{self.name}: {self.dead}")

    def _fail(self, future: Future, call: int, text: str) -> None:
        future.set_exception(EngineError(text))
        if call in self._answers:
            self._answers[call].put(None)  # wakes who waits for the next answer

    # --- calls ------------------------------------------------------------------------------------------------------

    def await_start(self) -> None:
        """Raises EngineError when the engine did not start, or not within rollout.start_timeout_s."""
        left = self.timeout_s - (time.time() - self._began)
        try:
            self._started.result(timeout=max(0.0, left))
        except TimeoutError as e:
            raise EngineError(f"no answer within {self.timeout_s:.0f} s (rollout.start_timeout_s)") from e

    def call(self, method: str, *arguments: Any, answers: queue.SimpleQueue | None = None) -> Future:
        """Start `method` of engine_host.Host. The future raises EngineError when the engine refuses or dies."""
        self.require_alive()
        number, future = next(self._numbers), Future()
        self._calls[number] = future
        if answers is not None:
            self._answers[number] = answers
        try:
            self._pipe.send((number, method, arguments))
        except OSError:
            self._die(f"its host process {self.host.pid} is gone")
        if self.dead:  # it died just now, before the listening thread knew of this call
            self._die(self.dead)
        return future

    def wait(self, future: Future, timeout_s: float, what: str) -> Any:
        """The result; EngineError when a process of the engine dies or nothing comes within timeout_s."""
        try:
            return future.result(timeout=timeout_s)
        except TimeoutError as e:
            raise self._hang(what, timeout_s) from e

    def _hang(self, what: str, timeout_s: float) -> EngineError:
        return EngineError(f"{self.name} hangs: {what} took more than {timeout_s:.0f} s (rollout.timeout_s)")

    def require_alive(self) -> None:
        if self.dead:
            raise EngineError(f"{self.name}: {self.dead}")

    def generate(self, requests: list[tuple[list[int], dict[str, Any]]], timeout_s: float) -> Iterator[Answer]:
        """Answers as they come. timeout_s bounds the time without one."""
        for answer in self._answers_to("generate", requests, timeout_s):
            yield self._unpacked(*answer)

    def score(self, sequences: list[list[int]], timeout_s: float) -> list[float]:
        """One number for each sequence of tokens, of an engine that scores. timeout_s bounds the time without one."""
        by_index = dict(self._answers_to("score", sequences, timeout_s))
        return [by_index[i] for i in range(len(sequences))]

    def _answers_to(self, method: str, requests: list[Any], timeout_s: float) -> Iterator[tuple]:
        answers: queue.SimpleQueue = queue.SimpleQueue()
        future = self.call(method, requests, answers=answers)
        for finished in range(len(requests)):
            try:
                answer = answers.get(timeout=timeout_s)
            except queue.Empty as e:
                raise self._hang(f"request {finished + 1} of {len(requests)}", timeout_s) from e
            if answer is None:
                future.result()
            yield answer
        self.wait(future, timeout_s, "the last answer")
        self._answers = {number: box for number, box in self._answers.items() if box is not answers}

    def _unpacked(self, index: int, tokens: bytes, logps: bytes, finish: str, text: str) -> Answer:
        if finish == "abort":
            raise EngineError(f"{self.name} refused a request: {text}")
        ids, numbers = np.frombuffer(bytearray(tokens), np.int64), np.frombuffer(bytearray(logps), np.float32)
        if len(ids) != len(numbers):
            raise EngineError(f"{self.name} gave {len(numbers)} log-probabilities for {len(ids)} tokens")
        return Answer(index, torch.from_numpy(ids), torch.from_numpy(numbers), finish, text)

    def load_weights(self, message: str) -> Future:
        """`message` goes to our loader in the schedulers; the future is done when all of them are."""
        return self.call("load_weights", message)

    def update_weights(self, serialized: list[Any], load_format: str | None, flush: bool) -> Future:
        """SGLang's own update_weights_from_tensor with one payload for each tp rank, for comparison."""
        return self.call("update_weights", serialized, load_format, flush)

    def release(self, tags: list[str]) -> None:
        if tags:
            self.wait(self.call("release", tags), CONTROL_TIMEOUT_S, "sleep")

    def resume(self, tags: list[str]) -> None:
        self.wait(self.call("resume", tags), CONTROL_TIMEOUT_S, "wake")

    def close(self) -> None:
        """End the engine's processes; it leaves in an orderly way within 15 s, or is killed."""
        self._pipe_shutdown()
        try:
            self.host.wait(timeout=15)
        except subprocess.TimeoutExpired:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.host.pid, signal.SIGKILL)
            self.host.wait()

    def _pipe_shutdown(self) -> None:
        """The host sees the end of the connection. Closing alone would not do: our listening thread holds it open."""
        import socket

        with contextlib.suppress(OSError), socket.socket(fileno=os.dup(self._pipe.fileno())) as end:
            end.shutdown(socket.SHUT_RDWR)


def _order(config: Config, scores: bool) -> Order:
    return Order(config, device.device().index if device.on_cuda() else -1, device.total_bytes(), scores)
