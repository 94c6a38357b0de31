"""The slow, independent reference: transformers generates, one prompt's samples at a time."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from megaflow.config.schema import Config, SamplingConfig
from megaflow.monitor.progress import mark
from megaflow.parallel import device
from megaflow.parallel.mesh import Mesh
from megaflow.rollout.base import BucketSource, PullSource, StaleWeights, sample_seed, share_of_engine
from megaflow.rollout.hf_routes import RouteRecorder
from megaflow.rollout.own_tensors import OwnTensors
from megaflow.rollout.published import published_tensors
from megaflow.shape import read_shape
from megaflow.types import ConfigError, Layout, Prompt, Sample


class HFRollout:
    """See base.Rollout. Every rank holds a whole model (rollout.tp must be 1)."""

    layout = Layout()
    returns_routes = True

    def __init__(self, config: Config, mesh: Mesh, tokenizer: Any, stop_token_ids: list[int]):
        from transformers import AutoConfig, AutoModelForCausalLM

        if config.rollout.tp != 1:
            raise ConfigError(f"rollout.backend=hf holds the whole model on each rank: rollout.tp must be 1, not {config.rollout.tp}")
        self.mesh, self.tokenizer, self.stop_token_ids = mesh, tokenizer, stop_token_ids
        self.device, dtype = device.device(), getattr(torch, config.model.dtype)
        self.model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(config.model.path), dtype=dtype).to(self.device).eval()
        self.parameters = dict(self.model.named_parameters())
        self.shape = read_shape(config.model.path)
        self.weights = OwnTensors(published_tensors(self.model.state_dict(keep_vars=True), self.shape), "hf model")
        self.version = -1
        self.asleep: set[str] = set()

    @torch.no_grad()
    def generate(
        self,
        prompts: list[Prompt],
        sampling: SamplingConfig,
        seed: tuple[int, int],
        num_samples: int,
        version: int,
        routes: bool = False,
    ) -> list[Sample]:
        """Collective. See base.Rollout."""
        samples: list[Sample] = []
        with self.mesh.together():
            if self.version != version or self.asleep:
                raise StaleWeights(f"the hf model holds version {self.version}, the trainer is at {version}; asleep: {sorted(self.asleep)}")
            for g in share_of_engine(len(prompts), self.mesh.engine_index, self.mesh.num_engines):
                seeds = [sample_seed(seed, prompts[g].id, i) for i in range(num_samples)]
                if not routes:
                    samples += self._group(prompts[g], g, seeds, sampling)
                    continue
                with RouteRecorder(self.model, self.shape) as recorder:
                    samples += recorder.filled(self._group(prompts[g], g, seeds, sampling))
        return samples

    def _group(self, prompt: Prompt, group: int, seeds: list[int], sampling: SamplingConfig) -> list[Sample]:
        generators = [torch.Generator().manual_seed(s) for s in seeds]
        tokens: list[list[int]] = [[] for _ in seeds]
        logps: list[list[float]] = [[] for _ in seeds]
        finish = [""] * len(seeds)
        ids = torch.tensor([prompt.tokens] * len(seeds), device=self.device)
        cache = None
        for position in range(sampling.max_new_tokens):
            mark("token", position + 1, sampling.max_new_tokens)
            out = self.model(ids, past_key_values=cache, use_cache=True)
            cache = out.past_key_values
            chosen, logp = _choose(out.logits[:, -1].float(), sampling, generators)
            for i in range(len(seeds)):
                if not finish[i]:
                    tokens[i].append(int(chosen[i]))
                    logps[i].append(float(logp[i]))
                    finish[i] = self._finished(tokens[i], sampling)
            if all(finish):
                break
            ids = chosen[:, None]
        return [
            Sample(
                prompt=prompt, group=group, index=i, response=torch.tensor(tokens[i]), rollout_logp=torch.tensor(logps[i]),
                finish=finish[i] or "length", version=self.version, text=self.tokenizer.decode(tokens[i], skip_special_tokens=True),
            )
            for i in range(len(seeds))
        ]  # fmt: skip

    def _finished(self, tokens: list[int], sampling: SamplingConfig) -> str:
        if not sampling.ignore_eos and tokens[-1] in self.stop_token_ids:
            return "stop"
        if sampling.stop and any(s in self.tokenizer.decode(tokens) for s in sampling.stop):
            return "stop"
        return ""

    def load_weights(self, source: BucketSource | PullSource, version: int, proof: bool) -> None:
        """Collective. See base.Rollout."""
        self.version = -1
        with self.mesh.together():
            self.weights.load(source, proof)
        self.version = version

    def sleep(self, level: int) -> None:
        """Collective. See base.Rollout: level 2 gives the parameters' memory back; there is no lasting KV cache."""
        self.asleep.add("kv_cache")
        if level == 2 and "weights" not in self.asleep:
            self.version = -1
            self.asleep.add("weights")
            for p in self.parameters.values():
                p.megaflow_nbytes = p.untyped_storage().nbytes()
                p.untyped_storage().resize_(0)
        device.release_cached_memory()

    def wake(self, tags: tuple[str, ...]) -> None:
        """Collective. See base.Rollout."""
        if "weights" in tags and "weights" in self.asleep:
            for p in self.parameters.values():
                p.untyped_storage().resize_(p.megaflow_nbytes)
        self.asleep -= set(tags)

    def close(self) -> None:
        """Collective."""
        del self.model
        self.parameters, self.weights = {}, OwnTensors({}, "hf model")


def _choose(logits: Tensor, sampling: SamplingConfig, generators: list[torch.Generator]) -> tuple[Tensor, Tensor]:
    """logits [n, V] -> (token [n], its log-probability [n] under the tempered distribution, before top-k and top-p cut it)."""
    if sampling.temperature == 0:
        logp = logits.log_softmax(-1)
        chosen = logp.argmax(-1)
        return chosen, logp.gather(-1, chosen[:, None])[:, 0]
    logp = (logits / sampling.temperature).log_softmax(-1)
    kept = _cut(logp.exp().cpu(), sampling)
    chosen = torch.stack([torch.multinomial(p, 1, generator=g) for p, g in zip(kept, generators, strict=True)])[:, 0].to(logits.device)
    return chosen, logp.gather(-1, chosen[:, None])[:, 0]


def _cut(probs: Tensor, sampling: SamplingConfig) -> Tensor:
    """Zero what top-k and top-p leave out."""
    order = probs.argsort(-1, descending=True)
    ranked = probs.gather(-1, order)
    drop = ranked.cumsum(-1) - ranked > sampling.top_p
    if sampling.top_k > 0:
        drop[:, sampling.top_k :] = True
    return probs.scatter(-1, order, ranked.masked_fill(drop, 0.0))
