"""How much device memory actor and engine may hold in each phase, from the configuration, and a word when they hold more."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from megaflow.config.schema import Config
from megaflow.shape import ModelShape
from megaflow.trainer.critic import needs_critic

GB = 1e9
BYTES = {"bfloat16": 2, "float32": 4}
# Not in any formula: CUDA context, workspaces and decode graphs of the engine (3 GB were seen on an H200), and of the actor what it keeps
# between steps beside weights and optimizer.
ENGINE_REST_GB = 6.0
ACTOR_REST_GB = 2.0


@dataclass(frozen=True)
class ActorBytes:
    """Of one rank, by kind."""

    parameters: float
    gradients: float
    optimizer: float

    @property
    def awake(self) -> float:
        return self.parameters + self.gradients + self.optimizer


def actor_bytes(cfg: Config, shape: ModelShape, data_parallel: int) -> ActorBytes:
    """Gradients in fp32; main weights (16-bit training only) and two moments in fp32, split over the data-parallel ranks by the distributed
    optimizer. A critic counts as a second model."""
    size, is_16_bit = BYTES[cfg.model.dtype], cfg.model.dtype == "bfloat16"
    each = shape.num_parameters / (cfg.parallel.tp * cfg.parallel.pp) * (2 if needs_critic(cfg) else 1)
    split = data_parallel if cfg.actor.distributed_optimizer else 1
    return ActorBytes(each * size, each * 4, each * (8 + 4 * is_16_bit) / split)


@dataclass(frozen=True)
class Budget:
    """1e9 bytes; `because` says what the actor's is made of."""

    actor_gb: float
    engine_gb: float
    because: str


def phase_budgets(cfg: Config, shape: ModelShape, data_parallel: int, device_bytes: float) -> dict[str, Budget]:
    """By phase. In sync both are awake for a moment; in rollout the actor sleeps; later the engine does."""
    total, held = device_bytes / GB, actor_bytes(cfg, shape, data_parallel)
    full_engine = min(total, cfg.rollout.mem_fraction * total + ENGINE_REST_GB)
    asleep = {"all": 0.0, "optimizer": held.parameters}.get(cfg.actor.offload, held.parameters + held.optimizer) / GB
    awake = held.awake / GB
    buckets = 2 * cfg.sync.bucket_mb * 2**20 / GB
    sleeping = f"asleep with actor.offload={cfg.actor.offload}"
    shares = f"parameters {held.parameters / GB:.1f}, gradients {held.gradients / GB:.1f}, optimizer {held.optimizer / GB:.1f} GB"
    both = Budget(awake + buckets + ACTOR_REST_GB, full_engine, f"{shares}, buckets {buckets:.1f} GB")
    generating = Budget(asleep + buckets + ACTOR_REST_GB, full_engine, f"{sleeping}: {asleep:.1f} GB, buckets {buckets:.1f} GB")
    training = Budget(total - ENGINE_REST_GB, ENGINE_REST_GB, f"{shares}, the rest of the device for activations")
    return {"sync": both, "rollout": generating, "reward": generating, "logprob": training, "logic": training, "update": training}


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
