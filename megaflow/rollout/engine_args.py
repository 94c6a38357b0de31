"""SGLang's arguments for an embedded engine, on CUDA and on CPU."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

from megaflow.config.footprint import kv_bytes_per_token, weight_bytes
from megaflow.config.schema import Config
from megaflow.rollout import latent_attention
from megaflow.rollout.sglang_plugin import quiet_logs
from megaflow.shape import ModelShape, read_shape

SMALLEST_KV_TOKENS = 256
# A prompt that is cut between two prefill batches is counted twice by SGLang's scheduler: of 256 requests it runs 255, and the last one
# alone when all the others are done (1.1 s of 3.7 s with 512 new tokens of a 1.5B model on an H200; sglang 0.5.15).
SPARE_REQUESTS = 1
LONGEST_ON_CPU = 1 << 16


def engine_args(order: Any, loaders: list[str]) -> Any:
    """sglang.srt.server_args.ServerArgs for an engine_host.Order; to be made in the host process, whose environment it changes."""
    quiet_logs()
    config = order.config
    r = config.rollout
    common = {
        "model_path": config.model.path,
        "load_format": "dummy",  # the first sync brings the weights, and proves them
        "dtype": config.model.dtype,
        "tp_size": r.tp,
        "ep_size": r.ep,
        "skip_tokenizer_init": not config.sampling.stop,  # tokens in, tokens out; stop strings need its tokenizer
        "random_seed": config.run.seed,
        "max_running_requests": r.max_running + SPARE_REQUESTS,
        "custom_weight_loader": loaders,
        "sampling_backend": "pytorch",
        "grammar_backend": "none",
        "log_level": "error",
        "disable_radix_cache": config.run.deterministic,  # a cached prefix is computed in another batch: equal but for the last bits
        "skip_server_warmup": True,  # a request more at the start; only its HTTP server would send it
    }
    if not order.scores and records_routes(config):
        common["enable_return_routed_experts"] = True
    shape = read_shape(config.model.path)
    if shape.experts is not None and shape.experts.shared_ffn_size:  # fused, it lies among the others, where no Hugging Face name leads
        common["disable_shared_experts_fusion"] = True
    if shape.latent is not None:
        common["json_model_override_args"] = json.dumps(latent_attention.ROUTING)
    if order.scores:
        common |= {"load_format": "auto", "is_embedding": True}
    return _cuda(order, common) if order.device >= 0 else _cpu(order, common)


def records_routes(config: Config) -> bool:
    """Whether the engine keeps its routers' choices beside the KV cache: 4 bytes a token, layer and chosen expert in pinned host memory,
    on each of its ranks."""
    return config.actor.router_replay != "none" and read_shape(config.model.path).experts is not None


def scoring_config(config: Config) -> Config:
    """What an engine of reward.model is started with: the keys of reward.model in the place of a generating engine's."""
    model = config.reward.model
    size = dataclasses.replace(config.rollout, tp=model.tp, ep=1, mem_fraction=model.mem_fraction, max_tokens=0)
    return dataclasses.replace(
        config,
        model=dataclasses.replace(config.model, path=model.path),
        rollout=dataclasses.replace(size, cuda_graph=False, sleep_level="1"),
        sampling=dataclasses.replace(config.sampling, stop=[]),
    )


def _cuda(order: Any, common: dict[str, Any]) -> Any:
    from sglang.srt.server_args import ServerArgs

    config, r = order.config, order.config.rollout
    graphs = {"cuda_graph_bs_decode": decode_graph_sizes(r.max_running)} if r.cuda_graph else {"disable_cuda_graph": True}
    return ServerArgs(
        **common,
        **graphs,
        base_gpu_id=order.device,
        attention_backend="triton" if r.attention_backend == "auto" else r.attention_backend,
        # The cache's size is ours to decide: SGLang would measure free memory, while the actor is being built on the same device.
        max_total_tokens=r.max_tokens or kv_tokens(config, _served_shape(order), order.device_bytes, order.section),
        mem_fraction_static=0.98,
        enable_memory_saver=True,
        enable_weights_cpu_backup=r.sleep_level == "1",
        disable_prefill_cuda_graph=True,  # 58 captures, more than a minute; prefill gains little from them
        enable_deterministic_inference=config.run.deterministic,
    )


def _served_shape(order: Any) -> ModelShape:
    shape = read_shape(order.config.model.path)
    return dataclasses.replace(shape, tied=True) if order.scores else shape  # no matrix of the vocabulary's logits


def _cpu(order: Any, common: dict[str, Any]) -> Any:
    from sglang.srt.server_args import ServerArgs

    config = order.config
    args = ServerArgs(
        **common,
        mem_fraction_static=0.1,
        device="cpu",
        attention_backend="torch_native",
        disable_cuda_graph=True,
        sleep_on_idle=True,  # its scheduler polls without a pause, on a core that the trainer needs
        max_total_tokens=config.rollout.max_tokens or (tokens_to_score(config) if order.scores else tokens_of_a_step(config)),
    )
    if order.scores:
        return args
    # Without it seeds are ignored; its own checks refuse torch_native, whose kernels the plugin makes right for it.
    args.enable_deterministic_inference = True
    return args


def tokens_of_a_step(config: Config) -> int:
    """KV cache for as many requests as may run at once, at full length."""
    r = config.rollout
    longest = config.data.max_prompt_tokens + config.sampling.max_new_tokens
    at_once = min(r.max_running, r.prompts_per_step * r.samples_per_prompt)
    return max(4096, at_once * longest)


def tokens_to_score(config: Config) -> int:
    """As for a step, and for the longest sequence that the model takes: in its own template and tokens one may be longer than here."""
    return max(tokens_of_a_step(config), min(read_shape(config.model.path).max_positions, LONGEST_ON_CPU))


def decode_graph_sizes(max_running: int) -> list[int]:
    """Batch sizes that get a decode graph; a batch runs in the next larger one. Decoding is bound by reading the weights, so a few rows of
    padding cost little, and each graph costs the start about a quarter of a second (SGLang's own list has 36 of them up to 256)."""
    sizes = [1, 2, 4, 8, 16, 24, 32, 48, 64, *range(96, 257, 32), *range(320, 513, 64), *range(640, 100_000, 128)]
    return [size for size in sizes if size < max_running] + [max_running, max_running + SPARE_REQUESTS]


def kv_tokens(config: Config, shape: ModelShape, device_bytes: int, section: str = "rollout") -> int:
    """Tokens of KV cache that rollout.mem_fraction of the device leaves beside the weights. Raises MemoryError when hardly any.

    section: what to call "rollout" in that error.
    """
    budget = int(config.rollout.mem_fraction * device_bytes)
    weights = weight_bytes(config, shape)
    tokens = (budget - weights) // kv_bytes_per_token(config, shape)
    if tokens < max(SMALLEST_KV_TOKENS, config.sampling.max_new_tokens):
        raise MemoryError(
            f"{section}.mem_fraction={config.rollout.mem_fraction} of the device's {device_bytes / 1e9:.1f} GB is {budget / 1e9:.1f} GB; "
            f"the weights take {weights / 1e9:.1f} GB, which leaves {max(tokens, 0)} tokens of KV cache; raise it, or {section}.tp"
        )
    return tokens
