"""Memory of one rank's device in each phase of a step, from the configuration and config.json alone: what is held, by kind and by side."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace

from megaflow.config.checks import generates
from megaflow.config.footprint import BYTES, kv_bytes_per_token, saving_bytes, stage_sizes, trained_bytes, weight_bytes
from megaflow.config.schema import Config
from megaflow.plan.activations import Activations, Pack
from megaflow.plan.hardware import Device
from megaflow.plan.models import Lengths, Models, steps_of

GB = 1e9
PHASES = ("startup", "sync", "rollout", "reward", "logprob", "update")
# Measured on H200s by NVML; tools/bench/update.py and sleep.py and mem/<phase>/outside_gb repeat it.
ENGINE_ASLEEP = 3.0e9  # context, decode graphs, workspaces of an engine in a run; they stay while it sleeps (1.4e9 before its first step)
CONTEXT = 0.71e9  # CUDA context of the trainer
KERNELS = 1.47e9  # that a step's passes load into it, 0.58e9 for those forward; they stay
NCCL_COMMUNICATOR = 0.42e9  # of a group over NVLink: 0.40e9 with tp=2, 0.44e9 with ep=2
NCCL_EXCHANGE = 1.1e9  # more, of the group in which tokens are sent to their experts
CUBLAS = 2 * 32 * 2**20  # torch's workspace on Hopper, for the thread that goes forward and for autograd's
ALLOCATOR = 0.05  # of activations: holes between packs of different sizes
USABLE = 0.97  # of the device: what a driver, a display, a neighbour's context may take


@dataclass
class Held:
    """Bytes in one phase. `actor` is what the trainer's allocator counts (mem/<phase>/actor_gb), `engine` what the engine's processes take,
    `outside` what the trainer takes of the device without its allocator."""

    actor: dict[str, float] = field(default_factory=dict)
    engine: dict[str, float] = field(default_factory=dict)
    outside: dict[str, float] = field(default_factory=dict)

    @property
    def actor_bytes(self) -> float:
        return sum(self.actor.values())

    @property
    def engine_bytes(self) -> float:
        return sum(self.engine.values())

    @property
    def total(self) -> float:
        return self.actor_bytes + self.engine_bytes + sum(self.outside.values())


class MemoryPlan:
    """Of a rank of one pipeline stage."""

    def __init__(self, config: Config, models: Models, world_size: int, device: Device, lengths: Lengths | None = None, stage: int = 0):
        self.config, self.models, self.world_size, self.device, self.stage = config, models, world_size, device, stage
        self.lengths = lengths or Lengths.longest(config)
        self.steps, self.has_engine = steps_of(config), generates(config)
        self.is_online = self.steps[-1].is_online
        self.offload = config.actor.offload if config.actor.offload != "auto" else self._least_offload()
        if not self.has_engine:
            self.offload = "none"  # the actor never sleeps
        self.phases = {name: getattr(self, f"_{name}")() for name in PHASES if self._has(name)}

    # --- what is asked of it --------------------------------------------------------------------------------------

    @property
    def usable(self) -> float:
        return self.device.memory * USABLE

    def too_large(self) -> dict[str, float]:
        """Phases that do not fit, and by how many bytes."""
        return {name: held.total - self.usable for name, held in self.phases.items() if held.total > self.usable}

    def fits(self) -> bool:
        return not self.too_large() and not self.lacks_kv_bytes()

    def lacks_kv_bytes(self) -> float:
        """Of an engine worker's cache, for one sequence of full length."""
        if not self.has_engine:
            return 0.0
        return max(0.0, self.least_kv_tokens() - self.kv_tokens()) * kv_bytes_per_token(self.config, self.models.policy)

    def largest_mem_fraction(self) -> float:
        """The most that the phases in which the engine has its cache leave to it, in hundredths, rounded down; below 0 if nothing."""
        awake = [self.phases[name] for name in ("startup", "rollout", "reward")]
        others = max(held.total - held.engine["weights"] - held.engine["KV cache"] for held in awake)
        return math.floor((self.usable - others) / self.device.memory * 100) / 100

    def kv_tokens(self) -> int:
        """Of one engine."""
        room = self.config.rollout.mem_fraction * self.device.memory - weight_bytes(self.config, self.models.policy)
        return self.config.rollout.max_tokens or max(0, int(room // kv_bytes_per_token(self.config, self.models.policy)))

    def least_kv_tokens(self) -> float:
        """One sequence of full length."""
        return Lengths.longest(self.config).total

    def full_requests(self) -> int:
        """Sequences of full length that the cache holds at once."""
        return int(self.kv_tokens() // self.least_kv_tokens())

    def host_bytes(self) -> float:
        """Pinned host memory of this rank: what sleeps there, and the reference's and reward model's weights."""
        trained = [self._policy, *([self._critic] if self._critic else [])]
        away = sum(each.parameters + each.optimizer - each.asleep(self.offload) for each in trained)
        return away + self._policy.parameters * self.models.reference + self._reward_weights

    def routes_bytes(self) -> float:
        """Pinned host memory in which an engine's worker keeps the routers' choices of all tokens in its cache, 4 bytes each."""
        experts = self.models.policy.experts
        if experts is None or self.config.actor.router_replay == "none":
            return 0.0
        return 4.0 * self.kv_tokens() * sum(experts.layers) * experts.top_k

    def saving_bytes(self) -> float:
        """Host memory of this rank for checkpoints, of the policy and a critic."""
        critic = self.models.critic
        found = saving_bytes(self.config, self.models.policy, self.world_size, self.stage)
        return found + (saving_bytes(self.config, critic, self.world_size, self.stage, "scalar") if critic else 0.0)

    # --- models -----------------------------------------------------------------------------------------------------

    @property
    def _policy(self):
        return trained_bytes(self.config, self.models.policy, self.world_size, self.stage)

    @property
    def _critic(self):
        shape = self.models.critic
        return trained_bytes(self.config, shape, self.world_size, self.stage, "scalar") if shape else None

    @property
    def _reward_weights(self) -> float:
        shape = self.models.reward_model
        size = BYTES[self.config.model.dtype]
        return stage_sizes(shape, self.config.parallel, self.stage, "scalar").total * size if shape else 0.0

    def _least_offload(self) -> str:
        """actor.offload=auto, as the actor decides it at its start."""
        room = self.device.memory * (1 - self.config.rollout.mem_fraction) - 6 * 2**30
        return next((mode for mode in ("none", "optimizer") if self._policy.asleep(mode) <= room), "all")

    @property
    def data_parallel(self) -> int:
        p = self.config.parallel
        return max(1, self.world_size // (p.tp * p.pp * p.cp))

    # --- phases -----------------------------------------------------------------------------------------------------

    def _has(self, phase: str) -> bool:
        """Without an engine nothing is generated or scored on the device; SFT asks for no log-probabilities before its update."""
        if phase in ("sync", "rollout", "reward"):
            return self.has_engine
        return phase != "logprob" or any(step.name != "sft" for step in self.steps)

    def _base(self, awake: bool) -> dict[str, float]:
        held = self._policy
        kinds = {"parameters": held.parameters, "gradients": held.gradients, "optimizer": held.optimizer}
        if not awake:
            kinds = {
                "parameters": held.asleep("optimizer") if self.offload != "all" else 0.0,
                "optimizer": held.optimizer if self.offload == "none" else 0.0,
            }
        return kinds | {"critic": self._critic.asleep(self.offload) if self._critic else 0.0, "tables": self._tables()}

    def _tables(self) -> float:
        """cuBLAS's workspaces, and the rotary embedding's angles, cosines and sines, of each model."""
        shape = self.models.policy
        dim = shape.head_dim if shape.latent is None else shape.latent.rope_dim
        models = 1 + sum(each is not None for each in (self.models.critic, self.models.reward_model))
        return CUBLAS + models * 3 * 4 * shape.max_positions * dim / 2

    def _engine(self, awake: bool, cache: bool = True) -> dict[str, float]:
        if not self.has_engine:
            return {}
        weights = float(weight_bytes(self.config, self.models.policy))
        cached = self.kv_tokens() * kv_bytes_per_token(self.config, self.models.policy)
        engines = 1 + (self.models.reward_fraction > 0)
        held = {"context, graphs": engines * ENGINE_ASLEEP, "weights": weights if awake else 0.0}
        return held | {"KV cache": float(cached) if awake and cache else 0.0}

    def _outside(self, activations: float = 0.0, kernels: float = KERNELS) -> dict[str, float]:
        p, mixed = self.config.parallel, self.models.policy.experts is not None
        sizes = [p.tp, p.cp, self.data_parallel, p.pp, *([p.ep, p.etp] if mixed else [])]
        communicators = sum(size > 1 for size in sizes) + (self.world_size > 1)
        nccl = communicators * NCCL_COMMUNICATOR + NCCL_EXCHANGE * (mixed and p.ep > 1)
        return {"CUDA context": CONTEXT + kernels, "NCCL": nccl, "allocator": ALLOCATOR * activations}

    def _buckets(self) -> float:
        """Two, where weights do not go straight from the actor's own memory; one more for what is gathered from other ranks."""
        return 3.0 * self.config.sync.bucket_mb * 2**20 if self.config.sync.transport == "buckets" else 0.0

    def _startup(self) -> Held:
        """Engine and actor are built side by side, each with all it has."""
        return Held(self._base(True), self._engine(True), self._outside(kernels=0.0))

    def _sync(self) -> Held:
        """The engine has its weights back, not yet its cache."""
        return Held(self._base(True) | {"buckets": self._buckets()}, self._engine(True, cache=False), self._outside())

    def _rollout(self) -> Held:
        return Held(self._base(False) | {"buckets": self._buckets()}, self._engine(True), self._outside())

    def _reward(self) -> Held:
        """As in rollout: the engine may be asked for more samples. A reward model on the mesh is copied in from the host."""
        held = self._rollout()
        if self.models.reward_model is not None:
            config, shape = self._variant(self.config.reward.model.micro_batch_tokens), self.models.reward_model
            pack, _ = self.lengths.pack(config.actor.micro_batch_tokens, self._samples)
            scoring = replace(pack, rows=0)
            activations = Activations(config, shape, self.stage).forward_peak(scoring)
            held.actor |= {"reward model": self._reward_weights, "activations": activations}
            held.outside = self._outside(activations)
        scoring = self.models.reward_fraction * self.device.memory
        held.engine |= {"reward model": scoring} if scoring else {}
        return held

    def _logprob(self) -> Held:
        """A pass without gradients, over all samples of the step; for the reference's its weights are put in the policy's place."""
        pack, _ = self.lengths.pack(self.config.actor.micro_batch_tokens, self._samples)
        passes = Activations(self.config, self.models.policy, self.stage)
        logits = passes.logits(pack.rows / self.config.parallel.cp, 0.0) if passes.is_last else 0.0
        peak = passes.forward_peak(pack)
        actor = self._base(True) | {"logits": min(logits, peak), "activations": peak - min(logits, peak)}
        actor |= {"reference": self._policy.parameters if self.models.reference else 0.0}
        if self._critic and self.is_online and self._critic.awake > actor["logits"] + actor["activations"] + actor["reference"]:
            activations = self._critic_pass().forward_peak(self._critic_pack(False))
            actor |= {"critic": self._critic.awake, "logits": 0.0, "reference": 0.0, "activations": activations}
        return Held(actor, self._engine(False), self._outside(peak))

    def _update(self) -> Held:
        """Forward and backward passes of the largest pack of a mini batch; with a critic, the more of its turn and the policy's."""
        policy = self._update_of_policy()
        if not self._critic or not self.is_online:
            return policy
        activations = self._critic_pass().update_peak(self._critic_pack(True), 0.0, 2)
        critic = self._base(True) | {"critic": self._critic.awake, "activations": activations}
        turn = Held(critic, self._engine(False), self._outside(activations))
        return max(policy, turn, key=lambda held: held.total)

    def _update_of_policy(self) -> Held:
        config = self.config
        pack, number = self.lengths.pack(config.actor.micro_batch_tokens, self.mini_batch, self._spread)
        passes = Activations(config, self.models.policy, self.stage)
        peak = passes.update_peak(pack, config.actor.logits_gb * GB, number)
        logits = passes.logits(pack.rows / config.parallel.cp, config.actor.logits_gb * GB) if passes.is_last else 0.0
        actor = self._base(True) | {"logits": logits, "activations": max(0.0, peak - logits)}
        return Held(actor, self._engine(False), self._outside(peak))

    @property
    def _samples(self) -> float:
        """Of the largest step, of one data-parallel rank."""
        return max(step.samples for step in self.steps) / self.data_parallel

    @property
    def mini_batch(self) -> float:
        """Of an optimizer step, of one data-parallel rank."""
        return self.config.actor.mini_batch / self.data_parallel if self.config.actor.mini_batch else self._samples

    @property
    def _spread(self) -> float:
        """Part by which the tokens of one mini batch may differ from another's, one standard deviation: lengths as if each token had the
        same chance to be the last (their deviation is then their mean), and alike within a group."""
        groups = max(1.0, self.mini_batch / self.config.rollout.samples_per_prompt)
        return self.lengths.response / self.lengths.total / math.sqrt(groups)

    def _variant(self, tokens: int) -> Config:
        """The configuration of a model that has its own micro_batch_tokens (0: the actor's)."""
        actor = self.config.actor
        return replace(self.config, actor=replace(actor, micro_batch_tokens=tokens or actor.micro_batch_tokens))

    def _critic_pass(self) -> Activations:
        return Activations(self._variant(self.config.critic.micro_batch_tokens), self.models.critic, self.stage)

    def _critic_pack(self, is_update: bool) -> Pack:
        """Rows get one number each, not logits."""
        budget = self.config.critic.micro_batch_tokens or self.config.actor.micro_batch_tokens
        lot = (self.mini_batch, self._spread) if is_update else (self._samples, 0.0)
        pack, _ = self.lengths.pack(budget, *lot)
        return replace(pack, rows=0)
