"""A rollout backend in one file: transformers' own generate(), one sample at a time. Slow, and whole.

    torchrun --nproc-per-node 2 launch/train_grpo.py --config docs/examples/generate_backend.yaml

docs/adding-a-backend.md explains it; megaflow/rollout/base.py says what each verb must do.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from megaflow.config.schema import Config, SamplingConfig
from megaflow.parallel import device
from megaflow.parallel.mesh import Mesh
from megaflow.rollout.base import BucketSource, PullSource, StaleWeights, sample_seed, share_of_engine
from megaflow.rollout.own_tensors import OwnTensors
from megaflow.types import ConfigError, Layout, Prompt, Sample


class GenerateRollout:
    """See megaflow.rollout.base.Rollout. Each rank is an engine of its own and holds a whole model, in its own process."""

    layout = Layout()  # which part of each tensor `load_weights` brings here: tp=1, all of it
    returns_routes = False

    def __init__(self, config: Config, mesh: Mesh, tokenizer: Any, stop_token_ids: list[int]):
        if config.rollout.tp != 1:
            raise ConfigError(f"this backend holds the whole model on each rank: rollout.tp must be 1, not {config.rollout.tp}")
        self.mesh, self.tokenizer, self.stop_token_ids = mesh, tokenizer, stop_token_ids
        described = AutoConfig.from_pretrained(config.model.path)
        self.model = AutoModelForCausalLM.from_config(described, dtype=getattr(torch, config.model.dtype)).to(device.device()).eval()
        self.tensors = dict(self.model.named_parameters())  # under the names of the Hugging Face folder: weights come under these
        self.weights = OwnTensors(self.tensors, "example's model")
        self.version = -1  # random weights so far: nothing to serve from

    # --- generating ----------------------------------------------------------------------------------------------------------------

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
        """Collective. This rank's part of the prompts, `num_samples` each."""
        samples: list[Sample] = []
        with self.mesh.together():  # an error here is raised on every rank
            if self.version != version:
                raise StaleWeights(f"this model holds version {self.version}, the trainer is at {version}")
            for group in share_of_engine(len(prompts), self.mesh.engine_index, self.mesh.num_engines):
                samples += [self._sample(prompts[group], group, index, sampling, seed) for index in range(num_samples)]
        return samples

    def _sample(self, prompt: Prompt, group: int, index: int, sampling: SamplingConfig, seed: tuple[int, int]) -> Sample:
        ids = torch.tensor([prompt.tokens], device=self.model.device)
        greedy = sampling.temperature == 0
        chance = {} if greedy else {"temperature": sampling.temperature, "top_p": sampling.top_p, "top_k": max(sampling.top_k, 0)}
        with torch.random.fork_rng():  # a sample's tokens depend on its seed alone, and the trainer's random state on none of it
            torch.manual_seed(sample_seed(seed, prompt.id, index))
            out = self.model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                do_sample=not greedy,
                max_new_tokens=sampling.max_new_tokens,
                eos_token_id=None if sampling.ignore_eos else self.stop_token_ids,
                pad_token_id=self.stop_token_ids[0],
                stop_strings=list(sampling.stop) or None,
                tokenizer=self.tokenizer if sampling.stop else None,
                output_logits=True,
                return_dict_in_generate=True,
                **chance,
            )
        response = out.sequences[0, ids.shape[1] :].cpu()  # [R]
        logits = torch.cat(out.logits).float().cpu() / (1.0 if greedy else sampling.temperature)  # [R, V], before top-p and top-k cut
        logp = logits.log_softmax(-1).gather(1, response[:, None])[:, 0]
        text = self.tokenizer.decode(response, skip_special_tokens=True)
        finish = "length" if len(response) == sampling.max_new_tokens and not self._ended(response, sampling) else "stop"
        return Sample(prompt, group, index, response, logp, finish, self.version, text=text)

    def _ended(self, response: torch.Tensor, sampling: SamplingConfig) -> bool:
        by_token = not sampling.ignore_eos and int(response[-1]) in self.stop_token_ids
        return by_token or any(each in self.tokenizer.decode(response) for each in sampling.stop)

    # --- weights -------------------------------------------------------------------------------------------------------------------

    def load_weights(self, source: BucketSource | PullSource, version: int, proof: bool) -> None:
        """Collective. Nothing is served before all of it has arrived, and on every rank."""
        self.version = -1
        with self.mesh.together():
            self.weights.load(source, proof)
        self.version = version

    # --- memory --------------------------------------------------------------------------------------------------------------------

    def sleep(self, level: int) -> None:
        """Collective. Level 2: the weights' memory goes back, and there is nothing to serve from until they come again."""
        if level == 2:
            self.version = -1
            for tensor in self.tensors.values():
                tensor.bytes_awake = tensor.untyped_storage().nbytes()
                tensor.untyped_storage().resize_(0)

    def wake(self, tags: tuple[str, ...]) -> None:
        """Collective. Takes the memory again; generate() makes and drops a KV cache of its own, so there is none to keep."""
        for tensor in self.tensors.values() if "weights" in tags else ():
            if not tensor.untyped_storage().nbytes():
                tensor.untyped_storage().resize_(tensor.bytes_awake)

    def close(self) -> None:
        """Collective."""
        del self.model, self.weights
        self.tensors = {}
