"""A configuration's plan as text: memory by phase, cache, what sleeps, seconds, and what to change."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from megaflow.config.footprint import heaviest_stage, kv_bytes_per_token, weight_bytes
from megaflow.config.schema import Config
from megaflow.plan.activations import Activations
from megaflow.plan.advice import Planner, advice
from megaflow.plan.duration import duration
from megaflow.plan.hardware import Device
from megaflow.plan.memory import GB, USABLE, MemoryPlan
from megaflow.plan.models import Lengths, Models, Step

KINDS = ("parameters", "gradients", "optimizer", "critic", "reference", "reward model", "activations", "logits", "buckets", "tables")
ENGINE_KINDS = ("weights", "KV cache", "reward model", "context, graphs")
OUTSIDE_KINDS = ("CUDA context", "NCCL", "allocator")


@dataclass(frozen=True)
class Traffic:
    """Of one sync. worker: bytes that an engine worker gets; link, network: those that it reads from another device of its host, from
    another host; how: pull or buckets."""

    worker: float
    link: float
    network: float
    how: str


@dataclass(frozen=True)
class Planned:
    """mfu: part of the device's operations that the trainer is taken to reach. lengths: None: the longest."""

    config: Config
    models: Models
    world_size: int
    device: Device
    traffic: Traffic
    mfu: float = 0.35
    lengths: Lengths | None = None
    ranks_per_host: int = 8

    def stage(self, stage: int, config: Config | None = None) -> MemoryPlan:
        return MemoryPlan(config or self.config, self.models, self.world_size, self.device, self.lengths, stage)

    def tightest(self, config: Config | None = None) -> MemoryPlan:
        """The stage that is nearest to the device's memory, or most beyond it."""
        config = config or self.config
        stages = {0, config.parallel.pp - 1, heaviest_stage(self.models.policy, config.parallel)}
        plans = [self.stage(stage, config) for stage in sorted(stages)]
        return max(plans, key=lambda plan: sorted((held.total for held in plan.phases.values()), reverse=True))

    def fits(self) -> bool:
        return self.tightest().fits()

    def seconds(self, config: Config | None = None) -> float:
        """Estimated, of a step of the last kind that the run makes."""
        return duration(config or self.config, self.tightest(config), self.mfu, self.traffic.link).step

    def text(self) -> str:
        worst = self.tightest()
        parts = [self._head(), *self._stages(worst), *self._engine(worst), *self._trainer(worst), *self._sync(worst), *self._time(worst)]
        return "\n".join([*parts, *self._verdict(worst)])

    def _head(self) -> str:
        shape, d = self.models.policy, self.device
        beside = [name for name in ("critic", "reward_model") if getattr(self.models, name)] + ["reference"] * self.models.reference
        also = f", with {', '.join(beside).replace('_', ' ')}" if beside else ""
        ranks = f"{self.world_size} rank(s) on {d.name} of {d.memory / GB:.1f} GB"
        return f"plan: {shape.family}, {shape.num_parameters / 1e9:.2f}B parameters, {self.config.model.dtype}{also}; {ranks}"

    def _stages(self, worst: MemoryPlan) -> list[str]:
        """The table of the tightest stage; of the others the totals."""
        pp = self.config.parallel.pp
        of = f" of pipeline stage {worst.stage}, the tightest of {pp}" if pp > 1 else ""
        lines = [f"memory of each rank{of}, 1e9 bytes:", *memory_table(worst)]
        for stage in range(pp) if 1 < pp <= 8 else ():
            if stage != worst.stage:
                lines.append(_row(f"total, stage {stage}", {n: h.total for n, h in self.stage(stage).phases.items()}))
        return lines

    def _engine(self, worst: MemoryPlan) -> list[str]:
        if not worst.has_engine:
            return ["no engine: all steps learn from stored data, and there is nothing to evaluate on"]
        config, shape = self.config, self.models.policy
        longest = worst.least_kv_tokens()
        engines = max(1, self.world_size // config.rollout.tp)
        requests = config.rollout.prompts_per_step * config.rollout.samples_per_prompt / engines
        cache = f"{worst.kv_tokens():,} tokens at {kv_bytes_per_token(config, shape):,} bytes"
        gets = f"it gets {requests:g} a step" if worst.is_online else "it answers the evaluations"
        return [
            f"KV cache of an engine: {cache}: room for {worst.full_requests():,} requests at full length ({longest:g} tokens); {gets} "
            f"and runs at most {config.rollout.max_running} at once",
            f"largest safe rollout.mem_fraction: {max(0.0, worst.largest_mem_fraction()):.2f} (now {config.rollout.mem_fraction:g})",
        ]

    def _trainer(self, worst: MemoryPlan) -> list[str]:
        each = Activations(self.config, self.models.policy, worst.stage)
        pack, number = worst.lengths.pack(self.config.actor.micro_batch_tokens, worst.mini_batch)
        lines = [
            f"activations: {each.of_token():,.0f} bytes a token of a rank (actor.recompute={self.config.actor.recompute}); largest pack "
            f"{pack.tokens:,} tokens, {pack.rows:,} rows of logits; {number} pack(s) an optimizer step, {each.in_flight(number):g} at once"
        ]
        if worst.host_bytes():
            lines.append(f"host memory of each rank: {worst.host_bytes() / GB:.1f} GB pinned (actor.offload={worst.offload})")
        if worst.routes_bytes():
            lines.append(f"host memory of each engine's worker: {worst.routes_bytes() / GB:.1f} GB pinned for routes (actor.router_replay)")
        if self.config.run.save_every or self.config.run.save_final:
            how = "from the first one on (run.async_save)" if self.config.run.async_save else "while one is written"
            lines.append(f"host memory of each rank for checkpoints: {worst.saving_bytes() / GB:.1f} GB {how}")
        return lines

    def _sync(self, worst: MemoryPlan) -> list[str]:
        if not worst.has_engine:
            return []
        t, when = self.traffic, "each sync" if worst.is_online else "the sync of each evaluation"
        links = f"{t.link / GB:.2f} over NVLink, {t.network / GB:.2f} over the network"
        return [f"{when} ({t.how}): {t.worker / GB:.2f} GB to an engine worker, of which {links}"]

    def _time(self, worst: MemoryPlan) -> list[str]:
        return [line for step in worst.steps for line in self._time_of(step, worst)]

    def _time_of(self, step: Step, worst: MemoryPlan) -> Iterator[str]:
        found = duration(self.config, worst, self.mfu, self.traffic.link, step)
        phases = ", ".join(f"{name} {seconds:.3g}" for name, seconds in found.seconds.items())
        kind = "mean" if worst.lengths.is_mean else "longest possible"
        lengths = f"{worst.lengths.prompt:.0f} + {worst.lengths.response:.0f} tokens a sequence ({kind})"
        what = f"a step of {lengths}" if step.is_online else f"an offline step ({step.name}) of {step.samples:g} times {lengths}"
        decoded = f", {found.batch:.0f} requests decoded at once" if step.is_online else ""
        yield f"{what}: about {found.step:.3g} s ({phases}){decoded}, MFU {self.mfu:g}"
        on_top = ["rewards"] * (step.name not in ("sft", "dpo")) + ["evaluations"] * worst.has_engine
        also = f"; {' and '.join(on_top)} come on top" if on_top else ""
        yield f"about {3600 / found.step:,.0f} steps and {found.tokens_per_hour:,.3g} tokens an hour{also}"

    def _verdict(self, worst: MemoryPlan) -> list[str]:
        if worst.fits():
            return ["it fits"]
        over = [f"{name} by {more / GB:.1f} GB" for name, more in worst.too_large().items()]
        if worst.lacks_kv_bytes():
            weights = weight_bytes(self.config, self.models.policy) / GB
            over.append(f"one sequence of {worst.least_kv_tokens():g} tokens in the KV cache (the weights take {weights:.1f} GB)")
        lines = [f"it does not fit ({USABLE:.0%} of the device counted): {', '.join(over)}", "what to change:"]
        lines += [f"  {line}" for line in advice(self.config, Planner(self.tightest, self.seconds, self.ranks_per_host))]
        more = next((n for n in (2, 4, 8, 16) if replace(self, world_size=n * self.world_size).fits()), None)
        return [*lines, f"  or --world-size {more * self.world_size}: as it is, it fits on so many ranks"] if more else lines


def memory_table(plan: MemoryPlan) -> list[str]:
    """One line for each kind that is anywhere, a column for each phase."""
    lines = [f"  {'':<24}" + "".join(f"{name:>10}" for name in plan.phases)]
    for side, kinds in (("actor", KINDS), ("engine", ENGINE_KINDS), ("outside", OUTSIDE_KINDS)):
        for kind in kinds:
            values = {name: getattr(held, side).get(kind, 0.0) for name, held in plan.phases.items()}
            if any(value >= GB / 1000 for value in values.values()):
                lines.append(_row(f"engine: {kind}" if side == "engine" else kind, values))
    lines.append(_row("total", {name: held.total for name, held in plan.phases.items()}))
    return lines


def _row(name: str, values: Mapping[str, float]) -> str:
    return f"  {name:<24}" + "".join(f"{value / GB:>10.2f}" if value else f"{'':>10}" for value in values.values())
