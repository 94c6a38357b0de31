"""What to change when a plan does not fit: each change is planned anew, so what is advised is known to fit (or said not to)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

from megaflow.config.footprint import kv_bytes_per_token
from megaflow.config.schema import Config
from megaflow.plan.memory import MemoryPlan

Planned = Callable[[Config], MemoryPlan]  # the heaviest stage's plan of a configuration
FEWEST_REQUESTS = 8  # at full length: an engine that runs fewer at once spends its time on reading weights
Change = tuple[str, Config]  # "section.key=value", and the configuration with it


def advice(config: Config, plan: Planned) -> list[str]:
    """Lines for a person; [] when it fits. First what mends it alone; else changes one after another until it fits."""
    if plan(config).fits():
        return []
    alone = [f"{text} alone is enough ({_worst(plan(changed))})" for text, changed in changes(config, plan) if plan(changed).fits()]
    return alone or _together(config, plan)


def _together(config: Config, plan: Planned) -> list[str]:
    lines: list[str] = []
    seen: set[str] = set()
    while not plan(config).fits():
        before = excess(plan(config))
        options = [(excess(plan(changed)), text, changed) for text, changed in changes(config, plan) if text not in seen]
        better = [each for each in options if each[0] < before]
        if not better:
            lines.append(f"with all that it still lacks {before / 1e9:.1f} GB: more ranks, or devices with more memory")
            break
        after, text, config = min(better, key=lambda each: each[0])
        seen.add(text)
        lines.append(f"{text}, which leaves {after / 1e9:.1f} GB too many" if after else f"{text}: then it fits ({_worst(plan(config))})")
    return lines


def excess(memory: MemoryPlan) -> float:
    """Bytes that all phases lack together, and the engine's cache for one sequence."""
    missing = max(0.0, memory.least_kv_tokens() - memory.kv_tokens()) * kv_bytes_per_token(memory.config, memory.models.policy)
    return sum(memory.too_large().values()) + missing


def changes(config: Config, plan: Planned) -> Iterator[Change]:
    """In the order of what they cost."""
    actor, rollout, parallel = config.actor, config.rollout, config.parallel
    memory = plan(config)
    if 0 < (fraction := memory.largest_mem_fraction()) < rollout.mem_fraction:
        smaller = replace(config, rollout=replace(rollout, mem_fraction=fraction, max_tokens=0))
        if plan(smaller).full_requests() >= FEWEST_REQUESTS:
            yield f"rollout.mem_fraction={fraction}", smaller
    longest = config.data.max_prompt_tokens + config.sampling.max_new_tokens
    tokens = actor.micro_batch_tokens // 2
    while tokens >= max(longest, 1024):
        yield f"actor.micro_batch_tokens={tokens}", replace(config, actor=replace(actor, micro_batch_tokens=tokens))
        tokens //= 2
    if actor.logits_gb > 1:
        yield "actor.logits_gb=1", replace(config, actor=replace(actor, logits_gb=1.0))
    for mode in ("optimizer", "all")[1 if memory.offload == "optimizer" else 2 if memory.offload == "all" else 0 :]:
        yield f"actor.offload={mode}", replace(config, actor=replace(actor, offload=mode))
    if actor.recompute == "none":
        yield "actor.recompute=full", replace(config, actor=replace(actor, recompute="full"))
    shape, tp = memory.models.policy, parallel.tp * 2
    if memory.world_size % (tp * parallel.pp * parallel.cp) == 0 and shape.num_kv_heads % tp == 0 and shape.num_heads % tp == 0:
        yield f"parallel.tp={tp} parallel.sp=true", replace(config, parallel=replace(parallel, tp=tp, sp=True))
    workers = rollout.tp * 2
    if memory.world_size % workers == 0 and shape.num_heads % workers == 0:
        yield f"rollout.tp={workers}", replace(config, rollout=replace(rollout, tp=workers))


def _worst(memory: MemoryPlan) -> str:
    phase = max(memory.phases, key=lambda name: memory.phases[name].total)
    return f"{phase} {memory.phases[phase].total / 1e9:.1f} of {memory.device.memory / 1e9:.1f} GB"
