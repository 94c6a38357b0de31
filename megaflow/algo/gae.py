"""Generalised advantage estimation: how much better each token made things than the critic expected."""

from __future__ import annotations

import torch
from torch import Tensor

from megaflow.algo.tokens import TokenAdvantages, TokenInputs
from megaflow.config.schema import AlgoConfig

WHITEN_EPS = 1e-8  # added to the variance, as in verl


def gae(rewards: Tensor, groups: Tensor, cfg: AlgoConfig, tokens: TokenInputs) -> TokenAdvantages:
    """A_t = delta_t + gamma lam A_{t+1} with delta_t = r_t + gamma V_{t+1} - V_t, and returns A_t + V_t.

    Schulman et al. 2015 (arXiv:1506.02438) equations 11 and 16. r_t is -penalty_t (Ouyang et al. 2022, arXiv:2203.02155, equation 2, token
    by token), plus the sample's reward at its last token. After the last token the value is 0; with gae.bootstrap a truncated response
    has the critic's there, since it would have gone on. With gae.whiten the advantages of all tokens of the step are shifted to mean 0
    and scaled to (unbiased) variance 1; the returns are those before that.

    rewards [N] float; groups are not looked at. Sums in float64, results fp32.
    """
    assert tokens.values is not None and tokens.last_value is not None, "gae needs a critic"
    lengths = torch.tensor([len(v) for v in tokens.values])
    values = _row(tokens.values)  # [R], all samples' tokens in a row
    reward = -_row(tokens.penalty) if tokens.penalty is not None else torch.zeros_like(values)
    ends = lengths.cumsum(0)
    some = lengths > 0
    reward[ends[some] - 1] += rewards.double()[some]
    after = torch.zeros_like(values)  # V_{t+1}
    after[:-1] = values[1:]
    bootstrap = tokens.truncated & cfg.gae.bootstrap
    after[ends[some] - 1] = torch.where(bootstrap, tokens.last_value.double(), 0.0)[some]
    advantage = discounted_sums(reward + cfg.gae.gamma * after - values, lengths, cfg.gae.gamma * cfg.gae.lam)
    returns = advantage + values
    if cfg.gae.whiten:
        advantage = whitened(advantage)
    return TokenAdvantages(_parts(advantage, lengths), _parts(returns, lengths))


gae.needs_tokens = True
gae.needs_values = True


def discounted_sums(deltas: Tensor, lengths: Tensor, discount: float) -> Tensor:
    """sum over l of discount^l delta_{t+l}, within each sequence. deltas [R], lengths [N] with sum R -> [R].

    From the last token to the first, all sequences that are long enough at once: as many steps as the longest has tokens.
    """
    out = torch.empty_like(deltas)
    longest_first = lengths.argsort(descending=True, stable=True)
    last = (lengths.cumsum(0) - 1)[longest_first]
    steps = torch.arange(int(lengths.max()) if len(lengths) else 0)
    alive = len(lengths) - torch.searchsorted(lengths.sort().values, steps, right=True)  # sequences longer than k
    total = deltas.new_zeros(len(lengths))
    for k, count in enumerate(alive.tolist()):
        at = last[:count] - k
        total = deltas[at] + discount * total[:count]
        out[at] = total
    return out


def whitened(values: Tensor) -> Tensor:
    """(x - mean) / sqrt(variance + 1e-8) over all of [R], the variance unbiased; a single value becomes 0."""
    variance = values.var() if len(values) > 1 else values.new_ones(())
    return (values - values.mean()) * (variance + WHITEN_EPS).rsqrt()


def _parts(row: Tensor, lengths: Tensor) -> list[Tensor]:
    """Copies, since a view takes the whole row with it when it is pickled for another rank."""
    return [part.clone() for part in row.float().split(lengths.tolist())]


def _row(parts: list[Tensor]) -> Tensor:
    return torch.cat([torch.zeros(0, dtype=torch.float64), *(p.double() for p in parts)])
