"""What a response's length takes off its reward, or adds to it. Pure functions of [N] numbers, one a sample."""

from __future__ import annotations

import torch
from torch import Tensor

from megaflow.config.schema import AlgoConfig


def length_shaping(groups: Tensor, lengths: Tensor, solved: Tensor, cfg: AlgoConfig, max_tokens: int) -> dict[str, Tensor]:
    """By name (`overlong`, `length`) what is to be added to the rewards, [N] float64; only what the configuration asks for.

    groups [N] int64, lengths [N] int64 response tokens, solved [N] bool; max_tokens: sampling.max_new_tokens.
    """
    terms = own_length_shaping(lengths, cfg, max_tokens)
    if cfg.length.form == "group":
        terms["length"] = cfg.length.coef * group_length_reward(lengths, groups, solved)
    return terms


def own_length_shaping(lengths: Tensor, cfg: AlgoConfig, max_tokens: int) -> dict[str, Tensor]:
    """Those terms of `length_shaping` that need nothing but the sample's own length."""
    terms = {}
    if cfg.overlong.buffer > 0:
        terms["overlong"] = cfg.overlong.penalty * overlong_punishment(lengths, max_tokens, cfg.overlong.buffer * max_tokens)
    if cfg.length.form == "linear":
        terms["length"] = -cfg.length.coef * lengths.double() / max_tokens
    return terms


def overlong_punishment(lengths: Tensor, max_tokens: int, buffer: float) -> Tensor:
    """0 up to max_tokens - buffer, then down linearly to -1 at max_tokens, and -1 beyond.

    lengths [N] int64, max_tokens and buffer in tokens -> [N] float64.
    DAPO (arXiv:2503.14476) equation 13, there with max_tokens = 20,480 and buffer = 4,096.
    """
    assert 0 < buffer <= max_tokens, (buffer, max_tokens)
    return ((max_tokens - buffer - lengths.double()) / buffer).clamp(-1.0, 0.0)


def group_length_reward(lengths: Tensor, groups: Tensor, solved: Tensor) -> Tensor:
    """0.5 for the shortest response of its group to -0.5 for the longest; one that is not solved gets at most 0. All of a length: 0.

    lengths [N] int64, groups [N] int64, solved [N] bool -> [N] float64. Kimi k1.5 (arXiv:2501.12599) section 2.3.3.
    """
    labels, index = torch.unique(groups, return_inverse=True)
    values = lengths.double()
    shortest = values.new_empty(len(labels)).scatter_reduce_(0, index, values, "amin", include_self=False)[index]
    longest = values.new_empty(len(labels)).scatter_reduce_(0, index, values, "amax", include_self=False)[index]
    place = 0.5 - (values - shortest) / (longest - shortest).clamp(min=1)
    place = torch.where(longest == shortest, 0.0, place)
    return torch.where(solved, place, place.clamp(max=0.0))
