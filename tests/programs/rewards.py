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


calls = {"rewards": 0, "losses": 0}  # of this process


def collapses(response, answer, prompt, good=48, bad=16) -> float:
    """`digits` for `good` samples, nothing for the next `bad` ones, then `digits` again. Give it one worker."""
    calls["rewards"] += 1
    return 0.0 if good < calls["rewards"] <= good + bad else 1.0 + digits(response, answer, prompt)


def nan_for_a_while(logp, inputs, cfg):
    """ppo_clip, but nan in the micro batches 9 and 10 of this process."""
    from megaflow.algo.losses import ppo_clip

    calls["losses"] += 1
    per_token, stats = ppo_clip(logp, inputs, cfg)
    return per_token * (float("nan") if calls["losses"] in (9, 10) else 1.0), stats
