"""What was planned against what a run measured, in one table: memory by phase and side, seconds by phase, bytes of a sync."""

from __future__ import annotations

from pathlib import Path

from megaflow.config.loading import load
from megaflow.config.schema import Config
from megaflow.monitor.recorded import Recorded, read_run
from megaflow.plan.duration import duration
from megaflow.plan.hardware import DEVICES, Device, device_named
from megaflow.plan.memory import GB
from megaflow.plan.models import Lengths, steps_of
from megaflow.trainer.planning import plan_run
from megaflow.types import ConfigError

NOTE = (
    "memory is the largest of all steps; engine_gb may be all that others have on the GPU (NVML hides whose it is in many containers), "
    "other programs' too. Seconds are estimates for models that fill the device: small ones wait for kernels to be launched"
)
HEAD = ("", "planned", "measured", "planned / measured")


def compare(path: Path, device: str = "", mfu: float = 0.35) -> str:
    """The plan is made for the mean lengths of the run's sequences, step by step: the largest of all steps' plans stands against
    the largest that was measured. Raises ConfigError when it is no run directory, PreflightError when its model is gone."""
    run = read_run(path)
    config = load(str(path / "config.yaml"), []).config
    ranks = run.env.get("ranks")
    world_size = ranks if isinstance(ranks, int) and ranks > 0 else 1
    steps = [line for line in run.metrics if "batch/tokens" in line]
    if not steps:
        raise ConfigError(f"{path}: no step with batch/tokens in its metrics.jsonl")
    found, on_cuda = (device_named(device), True) if device else device_of(run)
    plans = [plan_run(config, world_size, found, mfu, lengths=lengths_of(config, line)) for line in _spread(steps)]
    memory = [plan.stage(0) for plan in plans]  # rank 0's, which the metrics are of
    rows = [HEAD]
    for phase in memory[0].phases if on_cuda else ():
        for side in ("actor", "engine"):
            of = "rollout" if (phase, side) == ("sync", "engine") else phase  # it ends with the cache back, when the actor sleeps already
            planned = max(getattr(each.phases[of], f"{side}_bytes") for each in memory) / GB
            rows += _row(f"mem/{phase}/{side}_gb", planned, _largest(steps, f"mem/{phase}/{side}_gb"))
    middle = len(plans) // 2
    seconds = duration(config, memory[middle], mfu, plans[middle].traffic.link).seconds
    for phase, value in seconds.items() if on_cuda else ():
        rows += _row(f"time/{phase}", value, _median(steps, f"time/{phase}"))
    rows += _row("sync/bytes", plans[0].traffic.worker, _median(steps, "sync/bytes"))
    rows += _row("sync/link_bytes", plans[0].traffic.link, _median(steps, "sync/link_bytes"))
    note = NOTE if on_cuda else "no GPU of the table in this run: its mem/* is the resident set, which a plan says nothing of"
    if world_size != ranks:
        note += f"\n{path}/env.json is missing or does not say how many ranks there were: planned for 1; --device names the GPU that it had"
    return f"{run.name}: {len(steps)} steps on {world_size} rank(s), {found.name if on_cuda else 'CPU'}\n{_aligned(rows)}\n{note}"


def device_of(run: Recorded) -> tuple[Device, bool]:
    """The run's own by the name in env.json; (any, False) for one that is not in the table."""
    names = " ".join((run.env.get("devices") or {}).get("gpus") or []).lower()
    for key, device in DEVICES.items():
        if key in names:
            return device, True
    return DEVICES["h200"], False


def lengths_of(config: Config, line: dict) -> Lengths:
    """Mean prompt and response of a step; dynamic sampling may have had fewer groups. For SFT and DPO, which do not
    measure responses, half of the tokens."""
    step = steps_of(config)[0 if line.get("step", 0) <= config.offline.steps else -1]
    samples = max(1, step.samples - line.get("dynamic/missing", 0) * config.rollout.samples_per_prompt)
    total = line["batch/tokens"] / samples
    response = line.get("rollout/len_mean", min(config.sampling.max_new_tokens, total / 2))
    return Lengths(max(1.0, total - response), max(1.0, response), is_mean=True)


def _spread(steps: list[dict], most: int = 40) -> list[dict]:
    """At most so many steps, in order of their tokens, the shortest and the longest among them."""
    ordered = sorted(steps, key=lambda line: line["batch/tokens"])
    if len(ordered) <= most:
        return ordered
    return [ordered[i * (len(ordered) - 1) // (most - 1)] for i in range(most)]


def _largest(steps: list[dict], name: str) -> float | None:
    return max((line[name] for line in steps if line.get(name) is not None), default=None)


def _median(steps: list[dict], name: str) -> float | None:
    values = sorted(line[name] for line in steps if line.get(name) is not None)
    return values[len(values) // 2] if values else None


def _row(name: str, planned: float, measured: float | None) -> list[tuple[str, ...]]:
    if measured is None:
        return []
    form = {"sync": ",.0f", "time": ".3g", "mem": ".2f"}[name.partition("/")[0]]
    return [(name, format(planned, form), format(measured, form), f"{planned / measured:.2f}" if measured else "")]


def _aligned(rows: list[tuple[str, ...]]) -> str:
    widths = [max(len(row[i]) for row in rows) for i in range(4)]
    cells = [[row[0].ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(row[1:], widths[1:]))] for row in rows]
    return "\n".join("  " + "  ".join(row) for row in cells)
