"""Seconds of a step and tokens an hour, from a device's numbers: an estimate for choosing sizes, good to a factor of two and not to 10%."""

from __future__ import annotations

import math
from dataclasses import dataclass

from megaflow.config.footprint import kv_bytes_per_token, weight_bytes
from megaflow.config.schema import Config
from megaflow.data.cost import SequenceCost
from megaflow.plan.hardware import Device
from megaflow.plan.memory import MemoryPlan

MEMORY_EFFICIENCY = 0.6  # of a device's memory bandwidth while decoding
DECODE_STEP_S = 0.003  # of scheduling and sampling in each decode step, whatever the model (SGLang on an H200, 256 requests)
SYNC_S = 0.01  # of a sync beside its bytes: opening, digests, the engine's answer


@dataclass(frozen=True)
class Duration:
    """seconds: by phase. tokens: prompts and responses of a step."""

    seconds: dict[str, float]
    tokens: float
    batch: float  # requests that an engine decodes at once, on average while all run

    @property
    def step(self) -> float:
        return sum(self.seconds.values())

    @property
    def tokens_per_hour(self) -> float:
        return self.tokens / self.step * 3600


def duration(config: Config, memory: MemoryPlan, mfu: float, link_bytes: float, has_reference: bool) -> Duration:
    """mfu: part of the device's operations that the trainer reaches. link_bytes: that one engine worker reads over a link."""
    shape, lengths, device, world = memory.models.policy, memory.lengths, memory.device, memory.world_size
    samples = config.rollout.prompts_per_step * config.rollout.samples_per_prompt
    cost = SequenceCost.of(shape).forward(round(lengths.total), round(lengths.response))
    forward = samples * cost / (device.tflops * 1e12 * mfu * world)
    passes = (config.algo.old_logp == "recompute") + has_reference
    per_epoch = 4 if config.actor.recompute == "full" else 3
    rollout, batch = _rollout(config, memory)
    local = weight_bytes(config, shape)
    seconds = {
        "sync": SYNC_S + 2 * local / (device.memory_gb_s * 1e9) + link_bytes / (device.link_gb_s * 1e9) + _moved(memory, device),
        "rollout": rollout,
        "logprob": forward * passes,
        "update": forward * per_epoch * config.actor.epochs,
    }
    if memory.models.critic is not None:
        critic = samples * SequenceCost.of(memory.models.critic).forward(round(lengths.total)) / (device.tflops * 1e12 * mfu * world)
        seconds["logprob"] += critic
        seconds["update"] += critic * per_epoch * config.critic.epochs
    return Duration(seconds, samples * lengths.total, batch)


def _moved(memory: MemoryPlan, device: Device) -> float:
    """To host memory and back, with actor.offload."""
    return 2 * memory.host_bytes() / (device.host_gb_s * 1e9) if memory.offload != "none" else 0.0


def _rollout(config: Config, memory: MemoryPlan) -> tuple[float, float]:
    """(seconds, requests decoded at once). A prompt is computed once; a decode step reads the weights and the cache of all that run."""
    shape, lengths, device, rollout = memory.models.policy, memory.lengths, memory.device, config.rollout
    engines = max(1, memory.world_size // rollout.tp)
    requests = rollout.prompts_per_step * rollout.samples_per_prompt / engines
    middle = lengths.prompt + lengths.response / 2
    batch = max(1.0, min(requests, rollout.max_running, memory.kv_tokens() / max(1.0, middle)))
    cache = batch * middle * kv_bytes_per_token(config, shape)
    step = (weight_bytes(config, shape) + cache) / (device.memory_gb_s * 1e9 * MEMORY_EFFICIENCY) + DECODE_STEP_S
    prefill = SequenceCost.of(shape).forward(round(lengths.prompt)) * rollout.prompts_per_step / engines
    return prefill / (device.tflops * 1e12 * 0.4 * rollout.tp) + math.ceil(requests / batch) * lengths.response * step, batch
