"""Small things that several tests need: a model folder, a configuration, samples made by hand."""

from __future__ import annotations

import dataclasses
import json
import os
from pathlib import Path

import torch

from megaflow.config.schema import ActorConfig, AlgoConfig, Config, ModelConfig, ParallelConfig, RolloutConfig, SamplingConfig, SyncConfig
from megaflow.shape import Experts
from megaflow.types import Prompt, Sample

FAMILIES = (("llama", False), ("llama3", False), ("mistral", True), ("qwen2", True), ("qwen3", False), ("qwen3", True))
MIXTURES = (("qwen3_moe", False), ("qwen2_moe", True), ("mixtral", False), ("deepseek_v3", False))
LLAMA3_ROPE = {"rope_type": "llama3", "rope_theta": 1e4, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}


def model_folder(path: Path, family: str = "qwen2", tied: bool = True, layers: int = 4) -> str:
    """A random model with its tokenizer, at `path`. Family llama3: llama with Llama 3.1's rope scaling, at work within 16 positions."""
    from tools.make_tiny_model import make

    if not path.exists():
        kind = "llama" if family == "llama3" else family
        make(path, family=kind, tied=tied, layers=layers, hidden=128, heads=4, kv_heads=2, steps=0, seed=1)
        if family == "llama3":
            raw = json.loads((path / "config.json").read_text())
            raw["rope_parameters"] = {**LLAMA3_ROPE, "original_max_position_embeddings": 16}
            (path / "config.json").write_text(json.dumps(raw))
    return str(path)


def reward_model_folder(path: Path, family: str = "qwen2") -> str:
    """A random *ForSequenceClassification with one label, as transformers saves it, with the tiny model's tokenizer."""
    from transformers import AutoConfig, AutoModelForSequenceClassification, AutoTokenizer

    if path.exists():
        return str(path)
    model = model_folder(path.with_name(path.name + "-causal"), family, tied=True)
    torch.manual_seed(5)
    made = AutoModelForSequenceClassification.from_config(AutoConfig.from_pretrained(model, num_labels=1, pad_token_id=0))
    made.save_pretrained(path)
    AutoTokenizer.from_pretrained(model).save_pretrained(path)
    return str(path)


def config(model: str, tp=1, pp=1, rollout_tp=1, backend="sglang", actor=None, algo=None, sampling=None) -> Config:
    return Config(
        model=ModelConfig(path=model, dtype=os.environ.get("TEST_DTYPE", "float32")),
        parallel=ParallelConfig(tp=tp, pp=pp),
        actor=ActorConfig(**{"lr": 1e-3, "clip_grad": 1.0, "micro_batch_tokens": 128, **(actor or {})}),
        algo=algo or AlgoConfig(),
        rollout=RolloutConfig(tp=rollout_tp, backend=backend, prompts_per_step=8, samples_per_prompt=4, max_tokens=8192, cuda_graph=False),
        sampling=SamplingConfig(**{"max_new_tokens": 12, **(sampling or {})}),
        sync=SyncConfig(bucket_mb=1),
    )


def with_parallel(cfg: Config, parallel: ParallelConfig) -> Config:
    return dataclasses.replace(cfg, parallel=parallel)


def prompts(count: int, vocab: int, seed: int = 0) -> list[Prompt]:
    g = torch.Generator().manual_seed(seed)
    return [Prompt(f"made:{i}", torch.randint(3, vocab, (3 + i % 5,), generator=g).tolist(), "") for i in range(count)]


def samples(count: int, vocab: int, seed: int = 0) -> list[Sample]:
    """Ragged, with everything that an update reads; old_logp and ref_logp are to be set by `with_logprobs`."""
    g = torch.Generator().manual_seed(seed)
    made = []
    for i in range(count):
        prompt = Prompt(f"made:{i}", torch.randint(3, vocab, (2 + i % 6,), generator=g).tolist(), "")
        response = torch.randint(3, vocab, (1 + (i * 7) % 11,), generator=g)
        advantage = float(torch.randn((), generator=g))
        made.append(Sample(prompt, i // 4, i % 4, response, torch.zeros(len(response)), "stop", 0, advantage=advantage))
    return made


def with_routes(samples: list[Sample], experts: Experts) -> list[Sample]:
    """Routes drawn at random, most of them not the model's own, for every sample but each group's last."""
    for s in samples:
        if s.index < 3:
            g = torch.Generator().manual_seed(s.group * 100 + s.index)
            scores = torch.rand(s.num_tokens - 1, sum(experts.layers), experts.count, generator=g)
            s.routes = scores.topk(experts.top_k).indices.to(torch.uint8)
    return samples


def with_logprobs(samples: list[Sample], logps: list[torch.Tensor]) -> list[Sample]:
    """old_logp and ref_logp near `logps`, so that some ratios are clipped; the same noise for a sample wherever it lies."""
    for s, logp in zip(samples, logps, strict=True):
        g = torch.Generator().manual_seed(s.group * 100 + s.index)
        s.old_logp = logp + 0.3 * torch.randn(len(logp), generator=g)
        s.ref_logp = logp + 0.3 * torch.randn(len(logp), generator=g)
        s.rollout_logp = s.old_logp.clone()
    return samples
