"""The critic's part in a run: built when the advantage estimator reads values, asked before the update, taught with it."""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from megaflow.actor.critic import Critic
from megaflow.algo import ADVANTAGES
from megaflow.config.schema import Config
from megaflow.parallel.mesh import Mesh
from megaflow.plan.safetensors import is_converted
from megaflow.shape import ModelShape, read_shape
from megaflow.trainer.loading import load_weights
from megaflow.types import PreflightError, Sample, Stats
from megaflow.weights import folder

HEADS = (("score.weight", "score.bias"), ("v_head.summary.weight", "v_head.summary.bias"), ("v_head.weight", "v_head.bias"))
# transformers' sequence and token classification; TRL's value head; that of frameworks that save a plain linear layer


def needs_critic(cfg: Config) -> bool:
    return bool(getattr(ADVANTAGES.get(cfg.algo.advantage), "needs_values", False))


def build_critic(cfg: Config, mesh: Mesh, optimizer_steps: int) -> Critic | None:
    """Collective. With the weights of critic.path, or of model.path; None when the estimator reads no values."""
    if not needs_critic(cfg):
        return None
    path = cfg.critic.path or cfg.model.path
    shape = read_shape(path)
    critic = Critic(shape, cfg, mesh, optimizer_steps)
    load_scalar_model(path, shape, critic.parameters, mesh)
    critic.weights_changed()
    critic.sleep()
    return critic


@torch.no_grad()
def load_scalar_model(path: str, shape: ModelShape, parameters: dict[str, Tensor], mesh: Mesh, need_head: bool = False) -> None:
    """Fill a rank's parameters from a folder of a causal model or of a *ForSequenceClassification with one label.

    A folder without a head leaves the head at 0: the critic then expects nothing until it has seen rewards. With `need_head` that is
    a PreflightError, as is a head of more than one label.
    """
    body = {name: p for name, p in parameters.items() if not name.startswith("output_layer.")}
    load_weights(path, dataclasses.replace(shape, tied=False), body, mesh)
    source = None if is_converted(path) else folder.Folder(path)  # a converted folder has no head
    names = next(((w, b) for w, b in HEADS if source is not None and w in source.files), None)
    if names is None and need_head:
        sought = ", ".join(w for w, _ in HEADS)
        raise PreflightError(f"{path}: no scalar head ({sought}); a reward model is a *ForSequenceClassification folder")
    if names is None:
        return
    weight = source.read(names[0])
    if list(weight.shape) != [1, shape.hidden_size]:
        raise PreflightError(f"{path}: {names[0]} is {list(weight.shape)}, a scalar head is {[1, shape.hidden_size]} (num_labels=1)")
    if "output_layer.weight" not in parameters:  # another pipeline stage has it
        return
    parameters["output_layer.weight"].copy_(weight)
    if names[1] in source.files:
        parameters["output_layer.bias"].copy_(source.read(names[1]))


def add_values(critic: Critic, samples: list[Sample]) -> None:
    """Collective. What the critic expects before each token, and after the last, before it is taught."""
    with critic.awake():
        values, last = critic.values(samples)
    for s, v, after in zip(samples, values, last, strict=True):
        s.values, s.sums = v, s.sums | {"last_value": after}


def update_critic(critic: Critic, samples: list[Sample]) -> Stats:
    """Collective. critic/*."""
    with critic.awake():
        return critic.update(samples)
