"""Router replay: Megatron's own function of scores and choices, with the choice replayed; which routes reach which rank."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from megaflow.parallel import megatron_shim

megatron_shim.install()

from megatron.core.transformer.moe.moe_utils import topk_routing_with_score_function  # noqa: E402 (after the shim only)

from megaflow.actor.packing import Routes, make_micro_batch  # noqa: E402
from megaflow.actor.replay import Replay, Replays, Tally  # noqa: E402
from megaflow.parallel.mesh import Axis  # noqa: E402
from megaflow.shape import Experts  # noqa: E402
from tests import tiny  # noqa: E402

TOKENS, EXPERTS, CHOSEN = 16, 8, 4
KINDS = {
    "softmax over the chosen": dict(score_function="softmax"),
    "softmax over all": dict(score_function="softmax", use_pre_softmax=True),
    "sigmoid, groups, a bias, a factor": dict(score_function="sigmoid", num_groups=4, group_topk=2, scaling_factor=2.5, expert_bias=True),
}


def routed(kind: dict, routes: torch.Tensor | None, replays: bool = True, known: torch.Tensor | None = None):
    """(weights [T, E], map [T, E], gradient of the logits, how many differ) of Megatron's router on fixed logits."""
    g = torch.Generator().manual_seed(0)
    logits = torch.randn(TOKENS, EXPERTS, generator=g).requires_grad_()
    upstream = torch.randn(TOKENS, EXPERTS, generator=g)
    bias = torch.randn(EXPERTS, generator=g) if kind.get("expert_bias") else None
    replay = Replay(1, Tally(torch.zeros(2, dtype=torch.int64), counts=True), replays)
    if routes is not None:
        other = torch.zeros_like(routes)  # a layer in place 0, which is not ours
        replay.routes = Routes(torch.stack([other, routes], 1), torch.ones(TOKENS, dtype=torch.bool) if known is None else known)
    weights, chosen = topk_routing_with_score_function(logits, CHOSEN, **{**kind, "expert_bias": bias}, router_replay=replay)
    (weights * upstream).sum().backward()
    return weights.detach(), chosen, logits.grad, replay.tally.found.tolist()


def routes_of(chosen: torch.Tensor) -> torch.Tensor:
    return chosen.nonzero()[:, 1].view(TOKENS, CHOSEN).to(torch.uint8)  # ascending: seldom the router's own order


@pytest.mark.parametrize("kind", KINDS)
def test_the_natural_routes_change_not_one_bit(kind):
    weights, chosen, gradient, _ = routed(KINDS[kind], None)
    replayed = routed(KINDS[kind], routes_of(chosen))
    assert all(torch.equal(a, b) for a, b in zip((weights, chosen, gradient), replayed[:3], strict=True))
    assert replayed[3] == [0, TOKENS * CHOSEN]


def weights_in_float64(kind: dict, logits: torch.Tensor, routes: torch.Tensor) -> torch.Tensor:
    """[T, E] As the families define them, of chosen experts [T, K]: no bias in them, and no groups."""
    if kind["score_function"] == "softmax":
        scores = logits.softmax(-1).gather(1, routes)
        scores = scores if kind.get("use_pre_softmax") else scores / scores.sum(-1, keepdim=True)
    else:
        scores = logits.sigmoid().gather(1, routes)
        scores = kind["scaling_factor"] * scores / scores.sum(-1, keepdim=True)
    return torch.zeros_like(logits).scatter(1, routes, scores)


@pytest.mark.parametrize("kind", KINDS)
def test_other_routes_get_the_routers_own_weights_and_gradients(kind):
    g = torch.Generator().manual_seed(1)
    routes = torch.rand(TOKENS, EXPERTS, generator=g).topk(CHOSEN).indices
    weights, chosen, gradient, (differing, total) = routed(KINDS[kind], routes.to(torch.uint8))
    g = torch.Generator().manual_seed(0)
    logits = torch.randn(TOKENS, EXPERTS, generator=g).double().requires_grad_()
    expected = weights_in_float64(KINDS[kind], logits, routes)
    (expected * torch.randn(TOKENS, EXPERTS, generator=g)).sum().backward()
    torch.testing.assert_close(weights.double(), expected.detach(), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(gradient.double(), logits.grad, rtol=1e-5, atol=1e-6)
    assert torch.equal(chosen, expected != 0)
    natural = routed(KINDS[kind], None)[1]
    assert (differing, total) == (int((chosen & ~natural).sum()), TOKENS * CHOSEN) and differing > 0


def test_a_token_without_a_route_goes_its_own_way_and_measuring_changes_nothing():
    kind = KINDS["softmax over the chosen"]
    natural = routed(kind, None)
    other = (routes_of(natural[1]) + 1) % EXPERTS
    known = torch.arange(TOKENS) < 10
    weights, chosen, *_, (_, total) = routed(kind, other, known=known)
    assert torch.equal(weights[10:], natural[0][10:]) and not (chosen[:10] == natural[1][:10]).all(1).any()
    assert total == 10 * CHOSEN
    measured = routed(kind, other, replays=False)
    assert all(torch.equal(a, b) for a, b in zip(natural[:3], measured[:3], strict=True)) and measured[3][0] > 0


LAYERS = (False, True, True, False, True)  # the second and third of the three with experts lie here
HERE = (1, 2)


def replays(tp: int = 1, tp_rank: int = 0) -> Replays:
    made = Replays.__new__(Replays)
    made.experts = Experts(EXPERTS, CHOSEN, 16, LAYERS)
    made.replays, made.is_free, made.tally = True, False, Tally(torch.zeros(2, dtype=torch.int64))
    made.device, made.places = torch.device("cpu"), torch.tensor(HERE)
    made.cut = Axis(tp, tp_rank, None, tuple(range(tp))) if tp > 1 else None
    return made


def marked_samples(count: int = 5):
    """Of token t of sample i in layer l the routes are ((i, t, l, 0) all told: 40 i + 3 t + l) mod 251, and the three numbers after it."""
    made = tiny.samples(count, 99)
    for i, s in enumerate(made):
        t, layer, k = torch.meshgrid(torch.arange(s.num_tokens - 1), torch.arange(3), torch.arange(CHOSEN), indexing="ij")
        s.routes = ((40 * i + 3 * t + layer) % 251 + k).to(torch.uint8) if i != 1 else None
    return made


def expected_rows(samples, lengths) -> list:
    """One for each token of the pack: None, or its routes in the two layers that lie here."""
    rows = []
    for s, length in zip(samples, lengths, strict=False):
        own = [] if s.routes is None else [s.routes[t][list(HERE)].tolist() for t in range(s.num_tokens - 1)]
        rows += own + [None] * (length - len(own))
    return rows + [None] * (sum(lengths) - len(rows))


@pytest.mark.parametrize(("tp", "cp"), [(1, 1), (2, 1), (1, 2), (2, 2)])
def test_each_rank_has_the_routes_of_its_own_tokens_and_layers(tp, cp):
    samples = marked_samples()
    seen: dict[int, object] = {}
    for cp_rank in range(cp):
        axis = Axis(cp, cp_rank, None, tuple(range(cp))) if cp > 1 else None
        mb = make_micro_batch(samples, torch.device("cpu"), tp, axis)
        whole = expected_rows(samples, mb.packed.lengths)
        numbers = torch.arange(len(whole)) if axis is None else mb.packed.context.mine
        for tp_rank in range(tp):
            found = replays(tp, tp_rank).of(samples, mb.packed)
            for number, chosen, known in zip(numbers.chunk(tp)[tp_rank].tolist(), found.chosen.tolist(), found.known.tolist(), strict=True):
                assert number not in seen
                seen[number] = chosen if known else None
    assert [seen[n] for n in range(len(whole))] == whole
    assert sum(row is not None for row in whole) == sum(s.num_tokens - 1 for s in samples if s.routes is not None)


def test_nobody_reads_routes_that_are_neither_replayed_nor_counted():
    samples = marked_samples()
    packed = make_micro_batch(samples, torch.device("cpu")).packed
    made = replays()
    with made.free():
        assert made.of(samples, packed) is None
    made.replays = False
    assert made.of(samples, packed) is None
    with made.counting():
        assert made.of(samples, packed) is not None
    assert made.of([s for s in samples if s.routes is None], packed) is None


def test_the_share_that_differs_is_over_all_ranks():
    made = replays()
    made.tally.found += torch.tensor([3, 10])
    made.mesh = SimpleNamespace(all_gather=lambda mine: [mine, [1, 30], [0, 0]])
    assert made.differ() == {"moe/routes_differ": 4 / 40}
    made.mesh = SimpleNamespace(all_gather=lambda mine: [mine])
    assert made.differ() == {}, "nothing since the last call"
