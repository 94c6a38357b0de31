"""Put the parts of a run together from its configuration."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megaflow.actor.actor import Actor
from megaflow.actor.critic import Critic
from megaflow.actor.engine import TrainedEngine
from megaflow.actor.memory import HostCopy
from megaflow.algo import ADVANTAGES
from megaflow.config.checks import generates, gives_rewards
from megaflow.config.schema import Config
from megaflow.data import PromptStream, load_tokenizer
from megaflow.monitor.collector import spare_what_is_there
from megaflow.parallel.mesh import Mesh
from megaflow.rewards import RewardPool
from megaflow.rollout import BACKENDS
from megaflow.rollout.base import Rollout
from megaflow.rollout.restarts import Restarts
from megaflow.shape import read_shape
from megaflow.trainer.critic import build_critic
from megaflow.trainer.loading import load_weights
from megaflow.trainer.mesh_scorer import MeshScorer, build_reward_model, start_reward_engines
from megaflow.trainer.recovery import SteadyRollout
from megaflow.trainer.sampling import Sampler
from megaflow.trainer.startup import Startup
from megaflow.trainer.sync import Sync
from megaflow.types import ConfigError


@dataclass
class Parts:
    """What the loop works with. `rewards` is None except on rank 0; `ref` is the reference model's weights, if the algorithm reads them.

    rollout, sync and sampler are None in a run that generates nothing.
    """

    data: PromptStream
    actor: Actor
    ref: HostCopy | None
    rollout: Rollout | None
    rewards: RewardPool | None
    sync: Sync | None
    sampler: Sampler | None
    critic: Critic | None = None  # when the estimator reads values, and for training only
    needs_tokens: bool = False  # the estimator reads token-level tensors
    reward_model: MeshScorer | None = None  # of reward.model.where=mesh or engine
    startup: Startup | None = None
    restarts: Restarts | None = None  # of engines
    preference_ref: HostCopy | None = None  # the reference model of offline.objective=dpo

    @property
    def trained(self) -> list[TrainedEngine]:
        """What has an optimizer: the policy, and the critic if there is one."""
        return [self.actor] if self.critic is None else [self.actor, self.critic]

    def close(self) -> None:
        """Collective. In order: engines before process groups, workers last."""
        if self.rollout is not None:
            self.rollout.close()
        if self.reward_model is not None:
            self.reward_model.close()
        if self.rewards is not None:
            self.rewards.close()


def build(cfg: Config, mesh: Mesh, with_critic: bool = False, with_engine: bool | None = None) -> Parts:
    """Collective. with_critic: also the critic, if the advantage estimator reads its values.

    with_engine: None: if the steps or the evaluations of a training run need one.
    """
    startup = Startup()
    needs_engine = generates(cfg) if with_engine is None else with_engine
    restarts = Restarts(mesh, cfg.rollout.max_restarts)
    tokenizer = load_tokenizer(cfg.model.path)
    rollout = None
    if needs_engine:  # first: engines start beside what follows, and whoever uses them first waits for them
        rollout = BACKENDS.get(cfg.rollout.backend)(cfg, mesh, tokenizer, stop_token_ids(cfg.model.path, tokenizer))
        startup.engine_started(rollout)
    scorer = None
    if needs_engine and cfg.reward.model.where == "engine":
        with startup.part("reward_engine"):
            scorer = start_reward_engines(cfg, mesh, tokenizer, restarts)
    if rollout is not None and cfg.actor.router_replay != "none" and not getattr(rollout, "returns_routes", False):
        wanted, backend = cfg.actor.router_replay, cfg.rollout.backend
        raise ConfigError(f"actor.router_replay={wanted}: rollout.backend={backend} returns no routes; use none")
    data = PromptStream(cfg.data, tokenizer, cfg.rollout.prompts_per_step, cfg.run.seed)
    rewards = _on_rank0_only(mesh, lambda: RewardPool(cfg.reward) if gives_rewards(cfg) or needs_engine else None)
    with startup.part("actor"):
        actor = build_actor(cfg, mesh)
    ref = actor.host_copy() if needs_reference(cfg) else None
    preference_ref = ref if is_dpo(cfg) else None
    ref = ref if kl_reads_reference(cfg) else None
    critic = build_critic(cfg, mesh, optimizer_steps(cfg)) if with_critic else None
    needs_tokens = bool(getattr(ADVANTAGES.get(cfg.algo.advantage), "needs_tokens", False))
    sync = Sync(cfg, mesh, actor, rollout, restarts) if rollout is not None else None
    rollout = SteadyRollout(rollout, sync) if rollout is not None else None
    if rollout is not None and scorer is None:
        scorer = build_reward_model(cfg, mesh, tokenizer)
    sampler = Sampler(cfg, mesh, data, rollout, rewards, scorer) if rollout is not None else None
    spare_what_is_there()
    return Parts(data, actor, ref, rollout, rewards, sync, sampler, critic, needs_tokens, scorer, startup, restarts, preference_ref)


def build_actor(cfg: Config, mesh: Mesh) -> Actor:
    """Collective. The policy with the weights of model.path."""
    shape = read_shape(cfg.model.path)
    actor = Actor(shape, cfg, mesh, optimizer_steps(cfg))
    load_weights(cfg.model.path, shape, actor.parameters, mesh)
    actor.weights_changed()
    return actor


def needs_reference(cfg: Config) -> bool:
    return is_dpo(cfg) or kl_reads_reference(cfg)


def is_dpo(cfg: Config) -> bool:
    return cfg.offline.steps > 0 and cfg.offline.objective == "dpo"


def kl_reads_reference(cfg: Config) -> bool:
    return cfg.algo.kl.where != "none" and cfg.algo.kl.coef > 0


def optimizer_steps(cfg: Config) -> int:
    """Of the whole run: where the learning rate's decay ends."""
    samples = cfg.rollout.prompts_per_step * cfg.rollout.samples_per_prompt
    online = samples // (cfg.actor.mini_batch or samples)
    return cfg.actor.epochs * ((cfg.run.steps - cfg.offline.steps) * online + cfg.offline.steps * _mini_batches_offline(cfg))


def _mini_batches_offline(cfg: Config) -> int:
    """Of a step from stored data; of RL an estimate, since a stored prompt has as many samples as it has."""
    units = cfg.offline.batch or cfg.rollout.prompts_per_step
    sequences = units * {"rl": cfg.rollout.samples_per_prompt, "sft": 1, "dpo": 2}[cfg.offline.objective]
    return -(-sequences // (cfg.actor.mini_batch or sequences))


def stop_token_ids(model_path: str, tokenizer: Any) -> list[int]:
    """Every token that ends a response: those of generation_config.json, config.json and the tokenizer."""
    found: list[int] = [tokenizer.eos_token_id] if tokenizer.eos_token_id is not None else []
    for name in ("generation_config.json", "config.json"):
        path = Path(model_path) / name
        if path.is_file():
            eos = json.loads(path.read_text()).get("eos_token_id")
            found += eos if isinstance(eos, list) else [eos] if eos is not None else []
    return sorted(set(found))


def _on_rank0_only(mesh: Mesh, make) -> Any:
    """What `make` builds, on rank 0; None elsewhere. It need not be picklable; its error is raised on every rank."""
    built: list[Any] = []
    mesh.on_rank0(lambda: built.append(make()))
    return built[0] if built else None
