"""GAE against the recursion and the closed sum of Schulman et al. 2015 (arXiv:1506.02438), written here in float64; and on its way."""

from __future__ import annotations

import pickle
from dataclasses import replace

import pytest
import torch

from megaflow.algo import ADVANTAGES
from megaflow.algo.gae import discounted_sums, gae
from megaflow.algo.tokens import TokenInputs
from megaflow.config.schema import AlgoConfig, Config, GaeConfig, KLConfig
from megaflow.trainer.logic import apply_decisions, make_batch
from megaflow.trainer.token_advantages import value_stats
from megaflow.types import Prompt, Sample

LENGTHS = [3, 1, 7, 2, 7]
GAMMA, LAM = 0.97, 0.9


def inputs(penalty: bool = True) -> tuple[torch.Tensor, TokenInputs]:
    g = torch.Generator().manual_seed(0)
    draw = lambda n: torch.randn(n, generator=g, dtype=torch.float64)  # noqa: E731
    columns = [[draw(n) for n in LENGTHS] for _ in range(3)]
    truncated = torch.tensor([False, True, True, False, False])
    return draw(len(LENGTHS)), TokenInputs(columns[0], columns[1] if penalty else None, columns[2], draw(len(LENGTHS)), truncated)


def config(whiten=False, bootstrap=False, gamma=GAMMA, lam=LAM) -> AlgoConfig:
    return AlgoConfig(advantage="gae", gae=GaeConfig(gamma, lam, whiten, bootstrap))


def deltas(i: int, rewards, tokens: TokenInputs, bootstrap: bool) -> list[float]:
    """delta_t = r_t + gamma V(s_{t+1}) - V(s_t), equation 9 and below."""
    n = LENGTHS[i]
    r = [-float(tokens.penalty[i][t]) if tokens.penalty else 0.0 for t in range(n)]
    r[-1] += float(rewards[i])
    end = float(tokens.last_value[i]) if bootstrap and tokens.truncated[i] else 0.0
    v = [*tokens.values[i].tolist(), end]
    return [r[t] + GAMMA * v[t + 1] - v[t] for t in range(n)]


@pytest.mark.parametrize("penalty", [True, False], ids=["kl", "no kl"])
@pytest.mark.parametrize("bootstrap", [True, False], ids=["bootstrapped", "ends"])
def test_recursion_and_closed_sum(penalty, bootstrap):
    rewards, tokens = inputs(penalty)
    found = gae(rewards, torch.zeros(5), config(bootstrap=bootstrap), tokens)
    for i, n in enumerate(LENGTHS):
        d = deltas(i, rewards, tokens, bootstrap)
        recursion, after = [0.0] * n, 0.0
        for t in reversed(range(n)):
            after = recursion[t] = d[t] + GAMMA * LAM * after
        closed = [sum((GAMMA * LAM) ** k * d[t + k] for k in range(n - t)) for t in range(n)]
        assert recursion == pytest.approx(closed, rel=1e-12)
        assert found.advantages[i].tolist() == pytest.approx(recursion, rel=1e-6, abs=1e-6)
        returns = [a + float(v) for a, v in zip(recursion, tokens.values[i], strict=True)]
        assert found.returns[i].tolist() == pytest.approx(returns, abs=1e-6)


def test_with_lambda_1_it_is_the_discounted_return_minus_the_value():
    """Equation 18: the values in between cancel."""
    rewards, tokens = inputs(penalty=False)
    found = gae(rewards, torch.zeros(5), config(lam=1.0), tokens)
    for i, n in enumerate(LENGTHS):
        assert found.returns[i].tolist() == pytest.approx([GAMMA ** (n - 1 - t) * float(rewards[i]) for t in range(n)], abs=1e-6)


def test_with_lambda_0_it_is_the_one_step_error():
    rewards, tokens = inputs()
    found = gae(rewards, torch.zeros(5), config(lam=0.0), tokens)
    for i in range(5):
        assert found.advantages[i].tolist() == pytest.approx(deltas(i, rewards, tokens, False), abs=1e-6)


def test_whitening_counts_every_token_once_and_leaves_returns_alone():
    rewards, tokens = inputs()
    plain, white = (gae(rewards, torch.zeros(5), config(whiten=w), tokens) for w in (False, True))
    row = torch.cat(plain.advantages).double()
    mean = sum(row.tolist()) / len(row)
    std = (sum((x - mean) ** 2 for x in row.tolist()) / (len(row) - 1)) ** 0.5
    assert torch.cat(white.advantages).tolist() == pytest.approx([(x - mean) / std for x in row.tolist()], abs=1e-5)
    assert all(torch.equal(a, b) for a, b in zip(plain.returns, white.returns, strict=True))


def test_equal_advantages_and_a_single_token_whiten_to_0_not_to_nan():
    one = TokenInputs([torch.zeros(1)], None, [torch.zeros(1)], torch.zeros(1), torch.tensor([False]))
    assert gae(torch.tensor([3.0]), torch.zeros(1), config(whiten=True), one).advantages[0].tolist() == [0.0]
    same = TokenInputs([torch.zeros(1)] * 4, None, [torch.zeros(1)] * 4, torch.zeros(4), torch.zeros(4, dtype=torch.bool))
    found = gae(torch.ones(4), torch.zeros(4), config(whiten=True), same)
    assert torch.cat(found.advantages).tolist() == [0.0] * 4


def test_an_empty_response_among_others_moves_nothing():
    row = torch.tensor([1.0, 2.0, 4.0], dtype=torch.float64)
    lengths = torch.tensor([0, 2, 0, 1, 0])
    assert discounted_sums(row, lengths, 0.5).tolist() == [2.0, 2.0, 4.0]
    assert discounted_sums(row[:0], torch.tensor([0, 0]), 0.5).tolist() == []


def samples() -> list[Sample]:
    g = torch.Generator().manual_seed(1)
    made = []
    for i, n in enumerate(LENGTHS):
        s = Sample(Prompt(f"x:{i}", [1, 2], "?"), i, 0, torch.zeros(n).long(), torch.zeros(n), "length" if i in (1, 2) else "stop", 0)
        s.old_logp, s.ref_logp, s.values = (torch.randn(n, generator=g) for _ in range(3))
        s.reward = float(i)
        s.sums = {"ref_kl": float((s.old_logp - s.ref_logp).sum()), "last_value": 10.0}
        made.append(s)
    return made


def test_the_logic_block_takes_the_distance_off_token_by_token_and_hands_back_ragged_tensors():
    """By hand: lam 1, gamma 1: the return is what comes after; V stands only for itself."""
    made = samples()
    algo = AlgoConfig(advantage="gae", gae=GaeConfig(1.0, 1.0, False, False), kl=KLConfig("reward", "k1", 0.1))
    batch = make_batch(made, Config(algo=algo))
    back = apply_decisions(samples(), batch)
    for i, s in enumerate(back):
        penalty = 0.1 * (s.old_logp - s.ref_logp).double()
        returns = [float(i) - float(penalty[t:].sum()) for t in range(LENGTHS[i])]
        assert s.returns.tolist() == pytest.approx(returns, abs=1e-6)
        assert s.advantage.tolist() == pytest.approx([r - float(v) for r, v in zip(returns, s.values, strict=True)], abs=1e-6)
    bootstrapped = make_batch(samples(), Config(algo=replace(algo, gae=GaeConfig(1.0, 1.0, False, True))))
    gained = [float((d.returns - s.returns)[0]) for d, s in zip(bootstrapped.decisions.values(), back, strict=True)]
    assert gained == pytest.approx([0.0, 10.0, 10.0, 0.0, 0.0], abs=1e-5)


def test_what_goes_to_other_ranks_is_no_larger_than_its_tokens():
    made = samples() * 200
    for i, s in enumerate(made):
        made[i] = replace(s, group=i)
    batch = make_batch(made, Config(algo=AlgoConfig(advantage="gae")))
    tokens = sum(LENGTHS) * 200
    assert len(pickle.dumps(batch)) < 2 * 4 * tokens + 1500 * len(made), "views pickle the whole step's row, once for each sample"


def test_explained_variance_of_a_perfect_a_constant_and_a_harmful_critic():
    returns = [torch.tensor([1.0, 2.0]), torch.tensor([6.0])]
    assert value_stats(returns, returns)["critic/explained_variance"] == 1.0
    assert value_stats([torch.full((2,), 9.0), torch.full((1,), 9.0)], returns)["critic/explained_variance"] == pytest.approx(0.0)
    opposite = value_stats([-r for r in returns], returns)
    assert opposite["critic/explained_variance"] == pytest.approx(1 - 4) and opposite["critic/value_mean"] == pytest.approx(-3)
    assert value_stats([torch.zeros(2)], [torch.ones(2)])["critic/explained_variance"] == 0.0


def test_it_is_found_by_name_and_asks_for_tokens_and_values():
    assert ADVANTAGES.get("gae") is gae and gae.needs_tokens and gae.needs_values
