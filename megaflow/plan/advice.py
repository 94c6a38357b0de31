"""What to change when a plan does not fit: each change is planned anew, so what is advised is known to fit (or said not to)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from megaflow.config.schema import Config
from megaflow.plan.memory import GB, MemoryPlan

FEWEST_REQUESTS = 8  # at full length: an engine that runs fewer at once spends its time on reading weights
NEGLIGIBLE = 0.01  # of a step's seconds: less is no difference between two estimates


@dataclass(frozen=True)
class Change:
    """text: "section.key=value". divides: it lays ranks out anew, whose cost in communication no plan estimates."""

    text: str
    apply: Callable[[Config], Config]
    divides: bool = False


@dataclass(frozen=True)
class Planner:
    """memory: a configuration's tightest stage. seconds: of a step, estimated."""

    memory: Callable[[Config], MemoryPlan]
    seconds: Callable[[Config], float]
    ranks_per_host: int = 8


def advice(config: Config, plan: Planner) -> list[str]:
    """Lines for a person; [] when it fits. First what mends it alone; else changes one after another until it fits. Cheapest first."""
    if plan.memory(config).fits():
        return []
    alone = [change for change in by_cost(config, plan) if plan.memory(change.apply(config)).fits()]
    if alone:
        return [f"{change.text} alone is enough ({_price(config, change, plan)})" for change in alone]
    return _together(config, plan)


def _together(config: Config, plan: Planner) -> list[str]:
    """The cheapest that helps, again and again; then what a later one has made needless is left out, the dearest first."""
    chosen: list[Change] = []
    now = config
    while not (memory := plan.memory(now)).fits():
        taken = {change.text for change in chosen}
        better = (each for each in by_cost(now, plan) if each.text not in taken and excess(plan.memory(each.apply(now))) < excess(memory))
        if (cheapest := next(better, None)) is None:
            break
        chosen.append(cheapest)
        now = cheapest.apply(now)
    left = excess(memory)
    for change in reversed(chosen):
        without = [each for each in chosen if each is not change]
        if excess(plan.memory(applied(config, without))) <= left:
            chosen = without
    lines, now = [], config
    for change in chosen:
        before, now = now, change.apply(now)
        lines.append(f"{change.text}: {lacking(plan.memory(now))} ({_price(before, change, plan)})")
    if left:
        lines.append(f"with all that {lacking(plan.memory(now))}: more ranks, or devices with more memory")
    return lines


def applied(config: Config, changes: list[Change]) -> Config:
    for change in changes:
        config = change.apply(config)
    return config


def excess(memory: MemoryPlan) -> float:
    """Bytes that all phases lack together, and the engine's cache for one sequence: 0 when it fits, less is nearer to it."""
    return sum(memory.too_large().values()) + memory.lacks_kv_bytes()


def lacking(memory: MemoryPlan) -> str:
    """What one device lacks, in the phase that lacks most."""
    if memory.fits():
        phase = max(memory.phases, key=lambda name: memory.phases[name].total)
        return f"then it fits, {phase} {memory.phases[phase].total / GB:.1f} of {memory.device.memory / GB:.1f} GB"
    over = memory.too_large()
    if not over:
        return f"the KV cache still lacks {memory.lacks_kv_bytes() / GB:.1f} GB for one sequence"
    phase = max(over, key=lambda name: over[name])
    return f"{phase} still lacks {over[phase] / GB:.1f} GB"


def by_cost(config: Config, plan: Planner) -> list[Change]:
    """By the estimated seconds of a step; equal ones as `changes` has them; last those that divide."""
    now = plan.seconds(config)

    def cost(change: Change) -> tuple[bool, int]:
        return change.divides, round((plan.seconds(change.apply(config)) / now - 1) / NEGLIGIBLE)

    return sorted(changes(config, plan), key=cost)


def _price(config: Config, change: Change, plan: Planner) -> str:
    changed = change.apply(config)
    before, after, memory = plan.seconds(config), plan.seconds(changed), plan.memory(changed)
    differs = abs(after / before - 1) >= NEGLIGIBLE
    parts = [f"a step about {after:.3g} s, not {before:.3g}" if differs else f"a step about {after:.3g} s as before"]
    if change.divides:
        parts[0] += ", communication not counted"
    was, has = plan.memory(config).full_requests(), memory.full_requests()
    if was != has:
        parts.append(f"room for {has:,} requests at full length instead of {was:,}")
    return "; ".join(parts)


def changes(config: Config, plan: Planner) -> Iterator[Change]:
    memory = plan.memory(config)
    if memory.has_engine:
        yield from _of_the_cache(config, memory, plan)
    actor = config.actor
    longest = config.data.max_prompt_tokens + config.sampling.max_new_tokens
    tokens = actor.micro_batch_tokens // 2
    while tokens >= max(longest, 1024):
        yield Change(f"actor.micro_batch_tokens={tokens}", _setting("actor", micro_batch_tokens=tokens))
        tokens //= 2
    if actor.logits_gb > 1:
        yield Change("actor.logits_gb=1", _setting("actor", logits_gb=1.0))
    modes = ("none", "optimizer", "all")
    for mode in modes[modes.index(memory.offload) + 1 :] if memory.has_engine else ():
        yield Change(f"actor.offload={mode}", _setting("actor", offload=mode))
    if actor.recompute == "none":
        yield Change("actor.recompute=full", _setting("actor", recompute="full"))
    yield from _of_the_layout(config, memory, plan)


def _of_the_cache(config: Config, memory: MemoryPlan, plan: Planner) -> Iterator[Change]:
    """Down, where other things want the memory; up, where not one sequence has room."""
    fraction, now = memory.largest_mem_fraction(), config.rollout.mem_fraction
    least = FEWEST_REQUESTS if fraction < now else 1
    limit = {"max_tokens": 0} if config.rollout.max_tokens else {}
    change = _setting("rollout", mem_fraction=fraction, **limit)
    if 0 < fraction != now and (fraction < now or memory.lacks_kv_bytes()) and plan.memory(change(config)).full_requests() >= least:
        yield Change(f"rollout.mem_fraction={fraction}" + " rollout.max_tokens=0" * bool(limit), change)


def _of_the_layout(config: Config, memory: MemoryPlan, plan: Planner) -> Iterator[Change]:
    parallel, rollout = config.parallel, config.rollout
    shape, tp = memory.models.policy, parallel.tp * 2
    if memory.world_size % (tp * parallel.pp * parallel.cp) == 0 and shape.num_kv_heads % tp == 0 and shape.num_heads % tp == 0:
        yield Change(f"parallel.tp={tp} parallel.sp=true", _setting("parallel", tp=tp, sp=True), divides=True)
    workers, of_a_host = rollout.tp * 2, min(plan.ranks_per_host, memory.world_size)
    divides = memory.world_size % workers == 0 and of_a_host % workers == 0 and shape.num_heads % workers == 0
    if memory.has_engine and divides:
        yield Change(f"rollout.tp={workers}", _setting("rollout", tp=workers), divides=True)


def _setting(section: str, **values) -> Callable[[Config], Config]:
    return lambda config: replace(config, **{section: replace(getattr(config, section), **values)})
