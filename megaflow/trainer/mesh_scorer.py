"""A reward model beside the actor, on its ranks or in engines: samples from where they were made to one model each, and scores back."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch

from megaflow.actor.reward_model import RewardModel
from megaflow.config.schema import Config
from megaflow.data import load_tokenizer
from megaflow.data.prompts import messages_of
from megaflow.parallel.mesh import Mesh
from megaflow.rewards.model import is_configured
from megaflow.rollout.restarts import Restarts
from megaflow.rollout.scoring import ScoringEngines
from megaflow.shape import read_shape
from megaflow.trainer.critic import load_scalar_model
from megaflow.types import PreflightError, Prompt, Sample


class MeshScorer:
    """tokenizer: the reward model's own, or None when it reads the policy's tokens as they are."""

    def __init__(self, cfg: Config, mesh: Mesh, model: RewardModel | ScoringEngines, tokenizer: Any):
        self.cfg, self.mesh, self.model, self.tokenizer = cfg, mesh, model, tokenizer

    def score(self, samples: list[Sample]) -> None:
        """Collective. Put sums["reward_model"] into each rank's own samples, which no other rank has."""
        mine = self.model.share([self._asked(s) for s in samples])
        with self.model.awake():
            scores = self.model.scores(mine)
        by_place = {(s.group, s.index): score for s, score in zip(mine, scores, strict=True)}
        everywhere = {place: score for found in self.mesh.all_gather(by_place) for place, score in found.items()}
        for s in samples:
            s.sums["reward_model"] = everywhere[s.group, s.index]

    def close(self) -> None:
        """Collective."""
        if isinstance(self.model, ScoringEngines):
            self.model.close()

    def _asked(self, sample: Sample) -> Sample:
        """What the model reads of a sample: its tokens, or the same conversation in the model's own template."""
        bare = Sample(sample.prompt, sample.group, sample.index, sample.response, None, sample.finish, sample.version)
        tokens = list(sample.prompt.tokens)
        if self.tokenizer is not None:
            tokens, bare.response = conversation(self.tokenizer, sample, self.cfg), torch.zeros(0, dtype=torch.int64)
        longest = self.model.shape.max_positions
        if len(tokens) + len(bare.response) > longest:
            text = f"{len(tokens) + len(bare.response)} tokens of prompt {sample.prompt.id} and its response"
            raise PreflightError(f"reward.model.path={self.cfg.reward.model.path}: {text} exceed its {longest} positions")
        return dataclasses.replace(bare, prompt=Prompt(sample.prompt.id, tokens, ""))


def build_reward_model(cfg: Config, mesh: Mesh, tokenizer: Any) -> MeshScorer | None:
    """Collective. reward.model.path on the ranks, asleep; None without one, or when it is elsewhere. tokenizer: the policy's."""
    settings = cfg.reward.model
    if settings.where != "mesh" or not is_configured(settings):
        return None
    shape = read_shape(settings.path)
    model = RewardModel(shape, cfg, mesh)
    load_scalar_model(settings.path, shape, model.parameters, mesh, need_head=True)
    model.weights_loaded()
    return MeshScorer(cfg, mesh, model, _own_tokenizer(settings.path, tokenizer))


def start_reward_engines(cfg: Config, mesh: Mesh, tokenizer: Any, restarts: Restarts) -> MeshScorer | None:
    """Collective. reward.model.path in engines, started and asleep; None without one, or when it is elsewhere.

    What follows must wait: there would be no room for them beside the actor and a generating engine, both awake at the start.
    """
    settings = cfg.reward.model
    if settings.where != "engine" or not is_configured(settings):
        return None
    engines = ScoringEngines(cfg, mesh, restarts)
    engines.await_start()
    return MeshScorer(cfg, mesh, engines, _own_tokenizer(settings.path, tokenizer))


def _own_tokenizer(path: str, policys: Any) -> Any:
    own = load_tokenizer(path)
    return None if reads_the_same(own, policys) else own


def reads_the_same(own: Any, policys: Any) -> bool:
    """Whether equal tokens mean equal text, in an equal chat template."""
    return own.get_vocab() == policys.get_vocab() and own.chat_template == policys.chat_template


def conversation(tokenizer: Any, sample: Sample, cfg: Config) -> list[int]:
    """Prompt and response in tokens of the reward model: in its chat template, or one after the other with data.template=plain."""
    prompt = sample.prompt
    if cfg.data.template == "plain" or not tokenizer.chat_template:
        return tokenizer(prompt.text + sample.text).input_ids
    turns = [*messages_of(prompt.asked, cfg.data), {"role": "assistant", "content": sample.text}]
    text = tokenizer.apply_chat_template(turns, tokenize=False)
    return tokenizer(text, add_special_tokens=False).input_ids  # a chat template writes its own special tokens
