"""SGLang's own Engine, embedded in the ranks: the first rank of each rollout group owns one, its schedulers sit on the group's devices."""

from __future__ import annotations

import json
from concurrent.futures import Future
from typing import Any

import torch

from megaflow.config.schema import Config, SamplingConfig
from megaflow.parallel import device
from megaflow.parallel.channel import Channel, ChannelError
from megaflow.parallel.mesh import Mesh
from megaflow.rollout.base import EngineError, ProofError, StaleWeights, Stream, sample_seed, share_of_engine
from megaflow.rollout.engine_process import EngineProcess
from megaflow.rollout.sync_target import send
from megaflow.types import Layout, Prompt, Sample


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
