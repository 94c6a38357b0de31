"""SGLang's own Engine, embedded in the ranks: the first rank of each rollout group owns one, its schedulers sit on the group's devices."""

from __future__ import annotations

import asyncio
import json
import signal
import threading
import time
from collections.abc import Coroutine
from concurrent.futures import Future
from typing import Any

import torch

from megaflow.config.schema import Config, SamplingConfig
from megaflow.parallel import device
from megaflow.parallel.channel import Channel, ChannelError
from megaflow.parallel.mesh import Mesh
from megaflow.rollout.base import EngineError, ProofError, StaleWeights, Stream, sample_seed, share_of_engine
from megaflow.rollout.engine_args import engine_args, engine_env
from megaflow.rollout.sglang_plugin import note_sigquit
from megaflow.rollout.sync_target import send
from megaflow.types import Layout, Prompt, Sample

LOADER = "megaflow.rollout.engine_loader.load"


class SGLangRollout:
    """See base.Rollout."""

    def __init__(self, config: Config, mesh: Mesh, tokenizer: Any, stop_token_ids: list[int]):
        """Collective. Starts the engines, side by side. Raises EngineError on every rank if one does not start."""
        self.config, self.mesh, self.tokenizer, self.stop_token_ids = config, mesh, tokenizer, stop_token_ids
        group = mesh.rollout
        self.layout = Layout(group.size, group.index, fused=True)
        self.version = -1
        self.name = f"engine {mesh.engine_index} (ranks {group.ranks[0]}-{group.ranks[-1]})"
        self.is_owner = group.is_first
        self.channel: Channel | None = None
        self.flip_bucket = -1  # fault injection for tests
        self.asleep: set[str] = set()
        error = None
        try:
            self.engine = EngineProcess(config, mesh, self.name) if self.is_owner else None
        except Exception as e:
            error = EngineError(f"{self.name} did not start: {e}")
        mesh.all_ok(error)

    # --- generation -------------------------------------------------------------------------------------------------

    def generate(
        self, prompts: list[Prompt], sampling: SamplingConfig, seed: tuple[int, int], num_samples: int, version: int
    ) -> list[Sample]:
        """Collective. See base.Rollout."""
        error, samples = None, []
        try:
            self._require_fresh(version)
            if self.is_owner:
                samples = self._generate(prompts, sampling, seed, num_samples)
        except Exception as e:
            error = e
        self.mesh.all_ok(error)
        return samples

    def _require_fresh(self, version: int) -> None:
        if self.version != version:
            raise StaleWeights(f"{self.name} holds weights of version {self.version}, the trainer is at {version}; sync first")
        if self.asleep:
            raise StaleWeights(f"{self.name} sleeps ({', '.join(sorted(self.asleep))}); wake it first")

    def _generate(self, prompts, sampling, seed, num_samples) -> list[Sample]:
        wanted = [(g, i) for g in share_of_engine(len(prompts), self.mesh.engine_index, self.mesh.num_engines) for i in range(num_samples)]
        requests = [(prompts[g].tokens, self._params(sampling, sample_seed(seed, prompts[g].id, i))) for g, i in wanted]
        outputs = self.engine.generate(requests, self.config.rollout.timeout_s)
        return [self._sample(prompts[g], g, i, out) for (g, i), out in zip(wanted, outputs, strict=True)]

    def _params(self, sampling: SamplingConfig, seed: int) -> dict[str, Any]:
        params = {
            "max_new_tokens": sampling.max_new_tokens,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "top_k": sampling.top_k,
            "ignore_eos": sampling.ignore_eos,
            "sampling_seed": seed,
        }
        if not sampling.ignore_eos:
            params["stop_token_ids"] = self.stop_token_ids
        if sampling.stop:
            params["stop"] = list(sampling.stop)
        return params

    def _sample(self, prompt: Prompt, group: int, index: int, output: dict[str, Any]) -> Sample:
        tokens = output["output_ids"]
        logps = [entry[0] for entry in output["meta_info"]["output_token_logprobs"]]
        if len(logps) != len(tokens):
            raise EngineError(f"{self.name} gave {len(logps)} log-probabilities for {len(tokens)} tokens")
        return Sample(
            prompt=prompt,
            group=group,
            index=index,
            response=torch.tensor(tokens, dtype=torch.int64),
            rollout_logp=torch.tensor(logps, dtype=torch.float32),
            finish="length" if output["meta_info"]["finish_reason"]["type"] == "length" else "stop",
            version=self.version,
            text=self.tokenizer.decode(tokens, skip_special_tokens=True),
        )

    # --- weights ------------------------------------------------------------------------------------------------------

    def load_weights(self, stream: Stream, entries: list[list[tuple]], version: int, proof: bool) -> None:
        """Collective. See base.Rollout. The request to the engine stays open while buckets flow; only its answer says that all is done."""
        self.version = -1
        error = None
        channel = self._open_channel(entries)
        descriptors: list[Any] = [None] * self.mesh.rollout.size
        torch.distributed.all_gather_object(descriptors, channel.descriptor(), group=self.mesh.rollout.group)
        channel.begin()
        torch.distributed.barrier(group=self.mesh.rollout.group)  # every channel is empty before an engine looks into it
        request = self._request_load(descriptors, entries, proof) if self.is_owner else None
        try:
            send(channel, stream, proof)
        except ProofError as e:  # every rank has sent everything, so all of them come here; other errors end the run from where they are
            error = ProofError(f"{self.name}, tp rank {self.layout.rank}: {e}")
        except ChannelError as e:
            raise EngineError(f"{self.name}, tp rank {self.layout.rank}: {e}") from e
        if request is not None:
            self.engine.wait(request, self.config.rollout.timeout_s, "loading weights")
        self.mesh.all_ok(error)
        self.version = version

    def _open_channel(self, entries: list[list[tuple]]) -> Channel:
        if self.channel is None:
            capacity = max(sum(-(-e[3] // 256) * 256 for e in bucket) for bucket in entries)
            count = sum(len(bucket) for bucket in entries)
            self.channel = Channel(capacity, count, device.device(), self.config.rollout.timeout_s)
        return self.channel

    def _request_load(self, descriptors: list, entries: list[list[tuple]], proof: bool) -> Future:
        message = {
            "channels": descriptors,
            "buckets": entries,
            "dtype": self.config.model.dtype,
            "proof": proof,
            "flip": self.flip_bucket,
        }
        request = self.engine.load_weights(json.dumps(message))

        def check() -> None:
            self.engine.require_alive()
            if request.done():  # before the last bucket is copied: it was refused, or could not open the channel
                request.result()
                raise EngineError(f"{self.name} ended the load before all buckets had come")

        self.channel.check_peer = check
        return request

    # --- sleep and wake -------------------------------------------------------------------------------------------------

    def sleep(self, level: int) -> None:
        """Collective. See base.Rollout. Level 1's copy is SGLang's own (enable_weights_cpu_backup); on CPU weights simply stay."""
        keep_weights = level == 1 and not device.on_cuda()
        tags = ["kv_cache"] if keep_weights else ["kv_cache", "weights"]
        if level == 2:
            self.version = -1
        self._on_engine(lambda: self.engine.release([t for t in tags if t not in self.asleep]))
        self.asleep |= set(tags)

    def wake(self, tags: tuple[str, ...]) -> None:
        """Collective. See base.Rollout."""
        wanted = [t for t in tags if t in self.asleep]
        if wanted:
            self._on_engine(lambda: self.engine.resume(wanted))
        self.asleep -= set(tags)

    def _on_engine(self, action) -> None:
        error = None
        try:
            if self.engine is not None:
                action()
        except Exception as e:
            error = e
        self.mesh.all_ok(error)

    def close(self) -> None:
        """Collective."""
        if self.engine is not None:
            self.engine.close()
        self.mesh.barrier()


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

                engine = Engine(server_args=engine_args(config, mesh, [LOADER]))
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
        import atexit

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
