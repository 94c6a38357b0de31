"""Functions of a user's own: rewards and losses in a file, some of them wrong on purpose."""

from __future__ import annotations

import torch


def digits(response, answer, prompt, **options) -> float:
    """The part of the response that is digits: a random model earns different amounts with it."""
    return sum(c.isdigit() for c in response) / max(len(response), 1)


def fails(response, answer, prompt, **options) -> float:
    raise RuntimeError("the answer book is closed")


def centred(rewards, groups, cfg):
    """An advantage of one's own: the reward less the mean of all of the step's, twice."""
    return 2 * (rewards - rewards.mean())


def nan_loss(logp, inputs, cfg):
    return logp * float("nan"), {"ratio": torch.ones_like(logp)}
