"""Seconds of a step and tokens an hour, from a device's numbers: an estimate for choosing sizes, good to a factor of two and not to 10%."""

from __future__ import annotations

import math
from dataclasses import dataclass

from megaflow.config.footprint import kv_bytes_per_token, weight_bytes
from megaflow.config.schema import Config
from megaflow.data.cost import SequenceCost
from megaflow.plan.hardware import Device
from megaflow.plan.memory import MemoryPlan
from megaflow.plan.models import Step, kl_reads_reference

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


def duration(config: Config, memory: MemoryPlan, mfu: float, link_bytes: float, step: Step | None = None) -> Duration:
    """mfu: part of the device's operations that the trainer reaches. link_bytes: that one engine worker reads over a link.
    step: None: of the run's last kind."""
    step = step or memory.steps[-1]
    shape, lengths, device, world = memory.models.policy, memory.lengths, memory.device, memory.world_size
    flops = device.tflops * 1e12 * mfu * world
    forward = step.samples * SequenceCost.of(shape).forward(round(lengths.total), round(lengths.response)) / flops
    per_epoch = 4 if config.actor.recompute == "full" else 3
    training = {"logprob": forward * _passes(config, step), "update": forward * per_epoch * config.actor.epochs}
    if not step.is_online:
        return Duration({name: seconds for name, seconds in training.items() if seconds}, step.samples * lengths.total, 0.0)
    rollout, batch = _rollout(config, memory)
    local = weight_bytes(config, shape)
    sync = SYNC_S + 2 * local / (device.memory_gb_s * 1e9) + link_bytes / (device.link_gb_s * 1e9) + _moved(memory, device)
    if memory.models.critic is not None:
        critic = step.samples * SequenceCost.of(memory.models.critic).forward(round(lengths.total)) / flops
        training["logprob"] += critic
        training["update"] += critic * per_epoch * config.critic.epochs
    return Duration({"sync": sync, "rollout": rollout, **training}, step.samples * lengths.total, batch)


def _passes(config: Config, step: Step) -> int:
    """Without gradients, over all samples. DPO's are the policy's and, at a pair's first use, the reference model's."""
    if step.name in ("sft", "dpo"):
        return {"sft": 0, "dpo": 2}[step.name]
    return (config.algo.old_logp == "recompute") + kl_reads_reference(config)


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
