"""The process that holds one sglang.Engine, started by engine_process.EngineProcess.

A process of its own, not a thread of the rank: SGLang is imported and started beside the actor, and what it does to its environment,
signals and exit handlers is not done to the trainer.

Messages to the rank: ("ready", facts), ("failed", text), ("died", text), ("first", unix time), ("answer", call, index, tokens, logps,
finish, text, routes), ("done", call, result), ("error", call, text). From the rank: first the Order, then (call, method, arguments).
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import os
import signal
import sys
import tempfile
import threading
import time
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from typing import Any

from megaflow.config.schema import Config
from megaflow.monitor import stacks
from megaflow.monitor.collector import spare_what_is_there
from megaflow.rollout.engine_warm import start_warm
from megaflow.rollout.routes import unpacked
from megaflow.rollout.sglang_plugin import SCRATCH
from megaflow.shape import Experts, read_shape

LOADER = "megaflow.rollout.engine_loader.load"
PR_SET_PDEATHSIG = 1


@dataclass(frozen=True)
class Order:
    """Which engine to start. device: index of its first GPU, -1: CPU; device_bytes: memory of such a GPU.

    scores: it scores sequences with the model of `config.model.path` as that folder has it, and sleeps from its start on
    """

    config: Config
    device: int
    device_bytes: int
    scores: bool = False

    @property
    def section(self) -> str:
        """Of the configuration, where a person changes this engine's size."""
        return "reward.model" if self.scores else "rollout"


def scoring_memory(on_cuda: bool) -> list[str]:
    """What an engine that scores gives back while it sleeps; on CPU there is no other place for weights to go."""
    return ["kv_cache", "weights"] if on_cuda else ["kv_cache"]


class Host:
    """Serves one rank until the connection ends."""

    def __init__(self, connection: Connection, order: Order):
        self.connection, self.order = connection, order
        self.lock = threading.Lock()
        self.engine: Any = None
        self.processes: list[Any] = []
        self.is_first = True  # no request was served yet

    def send(self, *message: Any) -> None:
        with self.lock, contextlib.suppress(OSError):  # the rank is gone: the main thread sees the end too, and leaves
            self.connection.send(message)

    def live(self) -> None:
        """In a thread: SGLang then leaves this process's signals alone. Its children die with the thread that made them."""
        began = time.time()
        tempfile.tempdir = os.environ[SCRATCH]
        try:
            warm = start_warm(self.order.config.rollout.tp, self.order.device >= 0)
            import sglang.srt.entrypoints.engine  # noqa: F401

            from megaflow.rollout.engine_start import start_engine

            imported = time.time()
            self.engine, facts = start_engine(self.order, [LOADER], warm)
        except BaseException as e:  # the rank raises it
            self.send("failed", f"{type(e).__name__}: {e}" if str(e) else type(e).__name__)
            return
        watchdog = self.engine.tokenizer_manager._subprocess_watchdog
        self.processes = list(watchdog._processes)
        watchdog.stop()  # it would send this process SIGQUIT; we look ourselves
        threading.Thread(target=self.watch, daemon=True).start()
        if self.order.scores:  # at once: the actor is being built on the same device
            self.engine.loop.run_until_complete(self.release(-1, scoring_memory(self.order.device >= 0)))
        seconds = {"imports": imported - began, "start": time.time() - imported, **facts.pop("seconds")}
        self.send("ready", {"pids": [p.pid for p in self.processes], "seconds": seconds, **facts})
        spare_what_is_there()
        self.engine.loop.run_forever()

    def watch(self) -> None:
        """Tell the rank which process died, and how."""
        by_sentinel = {p.sentinel: p for p in self.processes}
        dead = by_sentinel[wait(list(by_sentinel))[0]]
        dead.join()
        self.send("died", f"its process {dead.pid} ({dead.name}) died with exit code {dead.exitcode}; its last words are above")

    def serve(self) -> None:
        """In the main thread, until the rank closes the connection or dies."""
        while True:
            try:
                call, method, arguments = self.connection.recv()
            except (EOFError, ConnectionResetError):
                return
            asyncio.run_coroutine_threadsafe(self.answer(call, method, arguments), self.engine.loop)

    async def answer(self, call: int, method: str, arguments: tuple) -> None:
        try:
            self.send("done", call, await getattr(self, method)(call, *arguments))
        except Exception as e:
            self.send("error", call, f"{type(e).__name__}: {e}")

    # --- what the rank may call -----------------------------------------------------------------------------------------

    async def generate(self, call: int, requests: list[tuple[list[int], dict[str, Any]]], routes: bool = False) -> None:
        """Sends each answer as soon as it is there; with the experts that each token was routed to, if `routes`."""
        first, self.is_first = self.is_first, False
        experts = read_shape(self.order.config.model.path).experts if routes else None
        await asyncio.gather(*(self._generate(call, i, *request, experts, first and i == 0) for i, request in enumerate(requests)))

    async def _generate(
        self, call: int, index: int, tokens: list[int], params: dict[str, Any], experts: Experts | None, is_first: bool
    ) -> None:
        import numpy as np

        request = {"input_ids": tokens, "sampling_params": params, "return_logprob": True, "return_routed_experts": experts is not None}
        output = await (self._timed(request) if is_first else self.engine.async_generate(**request))
        meta, ids = output["meta_info"], output["output_ids"]
        logps = [entry[0] for entry in meta["output_token_logprobs"]]
        finish = meta["finish_reason"]
        text = str(finish.get("message") or "") if finish["type"] == "abort" else ""
        packed = np.asarray(ids, dtype=np.int64).tobytes(), np.asarray(logps, dtype=np.float32).tobytes()
        routes = None if experts is None or text else unpacked(meta, experts, len(tokens) + len(ids))
        self.send("answer", call, index, *packed, finish["type"], text, routes)

    async def _timed(self, request: dict[str, Any]) -> dict[str, Any]:
        """As a stream, to see when the first token of this engine's life is there."""
        stream = await self.engine.async_generate(**request, stream=True)
        output = await anext(stream)
        self.send("first", time.time())
        async for later in stream:
            output = later
        return output

    async def score(self, call: int, sequences: list[list[int]]) -> None:
        """Sends each score as soon as it is there."""
        await asyncio.gather(*(self._score(call, i, tokens) for i, tokens in enumerate(sequences)))

    async def _score(self, call: int, index: int, tokens: list[int]) -> None:
        from sglang.srt.managers.io_struct import EmbeddingReqInput

        request = EmbeddingReqInput(input_ids=tokens)  # Engine.async_encode takes text only
        output = await anext(self.engine.tokenizer_manager.generate_request(request, None))
        finish, scores = output["meta_info"]["finish_reason"], output["embedding"]
        if finish["type"] == "abort":
            raise RuntimeError(f"it refused a sequence of {len(tokens)} tokens: {finish.get('message')}")
        if len(scores) != 1:
            raise RuntimeError(f"its model has {len(scores)} labels; a reward model has one")
        self.send("answer", call, index, float(scores[0]))

    async def load_weights(self, call: int, message: str) -> None:
        """`message` for our loader in the schedulers."""
        import torch
        from sglang.srt.utils import MultiprocessingSerializer

        # An empty tensor: any other one would travel as a file descriptor, with a socket and a handshake for it.
        payload = MultiprocessingSerializer.serialize([(message, torch.empty(0))])
        await self.update_weights(call, [payload] * self.engine.server_args.tp_size, LOADER, True)

    async def update_weights(self, call: int, serialized: list[Any], load_format: str | None, flush: bool) -> None:
        """SGLang's update_weights_from_tensor; `serialized`: one payload for each tp rank."""
        from sglang.srt.managers.io_struct import UpdateWeightsFromTensorReqInput

        request = UpdateWeightsFromTensorReqInput(serialized_named_tensors=serialized, load_format=load_format, flush_cache=flush)
        success, message = await self.engine.tokenizer_manager.update_weights_from_tensor(request, None)
        if not success:
            raise RuntimeError(f"it did not load the weights: {message}")

    async def release(self, call: int, tags: list[str]) -> None:
        """With overlapped scheduling the last answer is here while the scheduler still holds its batch; a release then would kill it."""
        from sglang.srt.managers.io_struct import ReleaseMemoryOccupationReqInput

        flushed = await self.engine.tokenizer_manager.flush_cache(60.0)
        if not flushed.success:
            raise RuntimeError(f"it still has requests and cannot sleep: {flushed.message}")
        await self.engine.tokenizer_manager.release_memory_occupation(ReleaseMemoryOccupationReqInput(tags=tags), None)

    async def resume(self, call: int, tags: list[str]) -> None:
        from sglang.srt.managers.io_struct import ResumeMemoryOccupationReqInput

        await self.engine.tokenizer_manager.resume_memory_occupation(ResumeMemoryOccupationReqInput(tags=tags), None)

    async def ping(self, call: int) -> None:
        """Its scheduler's event loop turns."""
        await self.engine.tokenizer_manager.get_internal_state()

    async def plain_generate(self, call: int, prompts: list[list[int]], params: list[dict[str, Any]], logprobs: bool) -> tuple[float, int]:
        """SGLang's own batched call with nothing of ours around it, for tools/bench: (seconds, tokens)."""
        start = time.perf_counter()
        outputs = await self.engine.async_generate(input_ids=prompts, sampling_params=params, return_logprob=logprobs)
        return time.perf_counter() - start, sum(len(o["output_ids"]) for o in outputs)

    def end(self) -> None:
        """End the schedulers; SIGTERM lets them give back what they have opened of the rank's (rollout/sglang_plugin.py)."""
        for p in self.processes:
            p.terminate()
        for p in self.processes:
            p.join(timeout=10)
            if p.is_alive():
                p.kill()
                p.join()


def note_sigquit(signum, frame) -> None:
    """A dying scheduler sends its parent SIGQUIT; `watch` finds out which one died, and says so."""


def serve(descriptor: int, parent: int) -> None:
    """Be the host at the end `descriptor` of a pipe that the process `parent` made."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)  # after a kill -9 of the rank nothing is left
    if os.getppid() != parent:
        return
    signal.signal(signal.SIGQUIT, note_sigquit)
    stacks.install()
    connection = Connection(descriptor)
    host = Host(connection, connection.recv())
    threading.Thread(target=host.live, name="sglang", daemon=True).start()
    host.serve()
    host.end()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # the engine's own exit handler would kill what is gone already, and its loop still runs
