"""Put the parts of a run together from its configuration."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megaflow.actor.actor import Actor
from megaflow.actor.memory import HostCopy
from megaflow.config.schema import Config
from megaflow.data import PromptStream, load_tokenizer
from megaflow.parallel.mesh import Mesh
from megaflow.rewards import RewardPool
from megaflow.rollout import BACKENDS
from megaflow.rollout.base import Rollout
from megaflow.shape import read_shape
from megaflow.trainer.sync import Sync
from megaflow.weights import folder


@dataclass
class Parts:
    """What the loop works with. `rewards` is None except on rank 0; `ref` is the reference model's weights, if the algorithm reads them."""

    data: PromptStream
    actor: Actor
    ref: HostCopy | None
    rollout: Rollout
    rewards: RewardPool | None
    sync: Sync

    def close(self) -> None:
        """Collective. In order: engines before process groups, workers last."""
        self.rollout.close()
        if self.rewards is not None:
            self.rewards.close()


def build(cfg: Config, mesh: Mesh) -> Parts:
    """Collective."""
    tokenizer = load_tokenizer(cfg.model.path)
    data = PromptStream(cfg.data, tokenizer, cfg.rollout.prompts_per_step, cfg.run.seed)
    rewards = _on_rank0_only(mesh, lambda: RewardPool(cfg.reward))
    actor = build_actor(cfg, mesh)
    ref = actor.host_copy() if cfg.algo.kl.where != "none" and cfg.algo.kl.coef > 0 else None
    rollout = BACKENDS.get(cfg.rollout.backend)(cfg, mesh, tokenizer, stop_token_ids(cfg.model.path, tokenizer))
    return Parts(data, actor, ref, rollout, rewards, Sync(cfg, mesh, actor, rollout))


def build_actor(cfg: Config, mesh: Mesh) -> Actor:
    """Collective. The policy with the weights of model.path."""
    shape = read_shape(cfg.model.path)
    actor = Actor(shape, cfg, mesh, optimizer_steps(cfg))
    folder.load(cfg.model.path, shape, actor.parameters, mesh.tp.size, mesh.tp.index)
    actor.weights_changed()
    return actor


def optimizer_steps(cfg: Config) -> int:
    """Of the whole run: where the learning rate's decay ends."""
    samples = cfg.rollout.prompts_per_step * cfg.rollout.samples_per_prompt
    return cfg.run.steps * cfg.actor.epochs * (samples // (cfg.actor.mini_batch or samples))


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
