"""How much device memory actor and engine may hold in each phase, from the configuration, and a word when they hold more."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass

from megaflow.actor.memory import engines_fraction
from megaflow.config.footprint import ActorBytes, heaviest_stage, trained_bytes
from megaflow.config.schema import Config
from megaflow.plan.memory import ENGINE_ASLEEP, GB
from megaflow.shape import ModelShape
from megaflow.trainer.critic import needs_critic

# Limits, with a margin over what is expected: of the engine's context, graphs and workspaces, and of what the actor keeps between steps
# beside weights and optimizer.
ENGINE_REST_GB = ENGINE_ASLEEP / GB + 2.0
ACTOR_REST_GB = 2.0


def actor_bytes(cfg: Config, shape: ModelShape, world_size: int) -> ActorBytes:
    """Of a rank of the stage that holds most. A critic counts as a second model of the policy's shape."""
    held = trained_bytes(cfg, shape, world_size, heaviest_stage(shape, cfg.parallel))
    models = 2 if needs_critic(cfg) else 1
    return ActorBytes(held.parameters * models, held.gradients * models, held.optimizer * models)


@dataclass(frozen=True)
class Budget:
    """1e9 bytes; `because` says what the actor's is made of."""

    actor_gb: float
    engine_gb: float
    because: str


def phase_budgets(cfg: Config, shape: ModelShape, world_size: int, device_bytes: float) -> dict[str, Budget]:
    """By phase. In sync both are awake for a moment; in rollout the actor sleeps; later the engine does."""
    total, held = device_bytes / GB, actor_bytes(cfg, shape, world_size)
    full_engine = min(total, cfg.rollout.mem_fraction * total + ENGINE_REST_GB)
    all_engines = min(total, engines_fraction(cfg) * total + ENGINE_REST_GB)
    asleep = held.asleep("none" if cfg.actor.offload == "auto" else cfg.actor.offload) / GB
    awake = held.awake / GB
    buckets = 2 * cfg.sync.bucket_mb * 2**20 / GB
    sleeping = f"asleep with actor.offload={cfg.actor.offload}"
    shares = f"parameters {held.parameters / GB:.1f}, gradients {held.gradients / GB:.1f}, optimizer {held.optimizer / GB:.1f} GB"
    both = Budget(awake + buckets + ACTOR_REST_GB, full_engine, f"{shares}, buckets {buckets:.1f} GB")
    generating = Budget(asleep + buckets + ACTOR_REST_GB, full_engine, f"{sleeping}: {asleep:.1f} GB, buckets {buckets:.1f} GB")
    training = Budget(total - ENGINE_REST_GB, ENGINE_REST_GB, f"{shares}, the rest of the device for activations")
    scoring = dataclasses.replace(generating, engine_gb=all_engines)
    return {"sync": both, "rollout": generating, "reward": scoring, "logprob": training, "logic": training, "update": training}


class BudgetWatch:
    """Compares a step's mem/<phase>/* with the budgets; says once for each phase and side what is over."""

    def __init__(self, budgets: Mapping[str, Budget]):
        self.budgets = budgets
        self._told: set[str] = set()

    def look(self, metrics: Mapping[str, float]) -> list[str]:
        texts = []
        for phase, budget in self.budgets.items():
            for side, limit, advice in (("actor", budget.actor_gb, _ADVICE_ACTOR), ("engine", budget.engine_gb, _ADVICE_ENGINE)):
                name = f"mem/{phase}/{side}_gb"
                if metrics.get(name, 0.0) > limit and name not in self._told:
                    self._told.add(name)
                    parts = f" ({budget.because})" if side == "actor" else ""
                    texts.append(f"{name}={metrics[name]:.1f} GB is over the {limit:.1f} GB that the configuration allows{parts}; {advice}")
        return texts


_ADVICE_ACTOR = "less: actor.micro_batch_tokens, actor.logits_gb or sync.bucket_mb down, actor.offload=optimizer or all, parallel.tp up"
_ADVICE_ENGINE = "less: rollout.mem_fraction, rollout.max_tokens or rollout.max_running down"
