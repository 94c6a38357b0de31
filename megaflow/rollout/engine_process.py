"""One sglang.Engine and its processes, watched: what waits for it here notices a death or a hang and names it."""

from __future__ import annotations

import asyncio
import atexit
import signal
import threading
import time
from collections.abc import Coroutine
from concurrent.futures import Future
from typing import Any

import torch

from megaflow.config.schema import Config
from megaflow.parallel import device
from megaflow.parallel.mesh import Mesh
from megaflow.rollout.base import EngineError
from megaflow.rollout.engine_args import engine_args, engine_env

LOADER = "megaflow.rollout.engine_loader.load"


def note_sigquit(signum, frame) -> None:
    """A dying scheduler sends its parent SIGQUIT; the next wait for the engine finds out which one died, and says so."""


class EngineProcess:
    """One sglang.Engine and its processes. Its event loop runs in a thread, so that waiting here can notice a death or a hang."""

    def __init__(self, config: Config, mesh: Mesh, name: str):
        self.name = name
        signal.signal(signal.SIGQUIT, note_sigquit)
        started: Future = Future()
        # A thread of its own from start to end: SGLang then leaves this process's signals alone, a hanging start can be timed, and its
        # children, which die with the thread that made them, live as long as its event loop.
        threading.Thread(target=self._live, args=(config, mesh, started), name="sglang", daemon=True).start()
        _wait_done(started, config.rollout.start_timeout_s)
        if not started.done():
            raise EngineError(f"no answer within {config.rollout.start_timeout_s:.0f} s (rollout.start_timeout_s)")
        self.engine = started.result()
        self.loop = self.engine.loop
        watchdog = self.engine.tokenizer_manager._subprocess_watchdog
        self.processes = list(watchdog._processes)
        watchdog.stop()  # it would send this process SIGQUIT; we look ourselves

    def _live(self, config: Config, mesh: Mesh, started: Future) -> None:
        try:
            with device.without_torchrun_env(), engine_env(config, mesh):
                from sglang.srt.entrypoints.engine import Engine

                engine = Engine(server_args=engine_args(config, [LOADER]))
        except BaseException as e:  # the caller raises it
            started.set_exception(e)
            return
        started.set_result(engine)
        engine.loop.run_forever()
        tasks = asyncio.all_tasks(engine.loop)
        for task in tasks:
            task.cancel()
        engine.loop.run_until_complete(asyncio.gather(*tasks, return_exceptions=True))

    def submit(self, work: Coroutine) -> Future:
        return asyncio.run_coroutine_threadsafe(work, self.loop)

    def wait(self, future: Future, timeout_s: float, what: str) -> Any:
        """The result; EngineError when a process of the engine dies or nothing comes within timeout_s."""
        deadline = time.monotonic() + timeout_s
        while not future.done():
            self.require_alive()
            if time.monotonic() > deadline:
                future.cancel()
                raise EngineError(f"{self.name} hangs: {what} took more than {timeout_s:.0f} s (rollout.timeout_s)")
            _wait_done(future, 0.1)
        return future.result()

    def require_alive(self) -> None:
        for p in self.processes:
            if not p.is_alive():
                raise EngineError(f"{self.name}: its process {p.pid} ({p.name}) died with exit code {p.exitcode}; its last words are above")

    def generate(self, requests: list[tuple[list[int], dict[str, Any]]], timeout_s: float) -> list[dict[str, Any]]:
        """Answers in the order of the requests. timeout_s bounds the time without a finished one."""
        futures = [
            self.submit(self.engine.async_generate(input_ids=tokens, sampling_params=params, return_logprob=True))
            for tokens, params in requests
        ]
        for finished, future in enumerate(futures):
            answer = self.wait(future, timeout_s, f"request {finished + 1} of {len(futures)}")
            if answer["meta_info"]["finish_reason"]["type"] == "abort":
                raise EngineError(f"{self.name} refused a request: {answer['meta_info']['finish_reason'].get('message')}")
        return [f.result() for f in futures]

    def load_weights(self, message: str) -> Future:
        from sglang.srt.managers.io_struct import UpdateWeightsFromTensorReqInput
        from sglang.srt.utils import MultiprocessingSerializer

        # one each: a serialized CPU tensor hands over a file descriptor, which only one worker can take
        each = [MultiprocessingSerializer.serialize([(message, torch.zeros(1))]) for _ in range(self.engine.server_args.tp_size)]
        request = UpdateWeightsFromTensorReqInput(serialized_named_tensors=each, load_format=LOADER, flush_cache=True)
        return self.submit(self._load(request))

    async def _load(self, request) -> None:
        success, message = await self.engine.tokenizer_manager.update_weights_from_tensor(request, None)
        if not success:
            raise EngineError(f"{self.name} did not load the weights: {message}")

    def release(self, tags: list[str]) -> None:
        from sglang.srt.managers.io_struct import ReleaseMemoryOccupationReqInput

        if tags:
            self._await_idle()
            request = ReleaseMemoryOccupationReqInput(tags=tags)
            self.wait(self.submit(self.engine.tokenizer_manager.release_memory_occupation(request, None)), 60.0, "sleep")

    def _await_idle(self) -> None:
        """With overlapped scheduling the last answer is here while the scheduler still holds its batch; a release then would kill it."""
        flushed = self.wait(self.submit(self.engine.tokenizer_manager.flush_cache(60.0)), 90.0, "finishing its last batch")
        if not flushed.success:
            raise EngineError(f"{self.name} still has requests and cannot sleep: {flushed.message}")

    def resume(self, tags: list[str]) -> None:
        from sglang.srt.managers.io_struct import ResumeMemoryOccupationReqInput

        request = ResumeMemoryOccupationReqInput(tags=tags)
        self.wait(self.submit(self.engine.tokenizer_manager.resume_memory_occupation(request, None)), 60.0, "wake")

    def close(self) -> None:
        """End the engine's own processes. Engine.shutdown would kill every child of this rank, reward workers too."""
        atexit.unregister(self.engine.shutdown)
        for p in self.processes:
            p.terminate()
        for p in self.processes:
            p.join(timeout=10)
            if p.is_alive():
                p.kill()
                p.join()
        self.loop.call_soon_threadsafe(self.loop.stop)


def _wait_done(future: Future, seconds: float) -> None:
    try:
        future.exception(timeout=seconds)
    except (TimeoutError, asyncio.CancelledError):
        return
