"""Invariant 1: one step is the same whatever the layout and the split, and equals plain PyTorch with transformers in float64.

Tolerances: loss and gradient norm of the first step are held to 1e-5 relative, gradients to 1e-4 of a tensor's largest entry. The second
step is held to 5e-4 only (measured: 9e-5): Adam's first update is lr * gradient / |gradient|, so an entry whose gradient is rounding
error moves by a whole lr this way or that, whatever computes it.
"""

from __future__ import annotations

import functools

import pytest
import torch
from safetensors.torch import load_file

from megaflow.rollout.published import published_tensors
from megaflow.shape import read_shape
from tests import tiny
from tests.programs.one_step import ALGO
from tests.ranks import run_ranks

NO_CLIP, WHOLE = 0.0, 4096
TOLERANCE = (1e-5, 5e-4)  # relative, of the first step's numbers and of the second's
SAMPLES, PER_STEP = 24, 12


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    base = tmp_path_factory.mktemp("models")
    return lambda family, tied: tiny.model_folder(base / f"{family}-{tied}", family, tied)


class PlainPyTorch:
    """The same two steps with transformers' model, autograd and torch's AdamW, in float64, one sequence at a time."""

    def __init__(self, model_path: str, aggregation: str = "token", routes: bool = False):
        from transformers import AutoModelForCausalLM

        self.aggregation = aggregation
        eager = {"attn_implementation": "eager", "experts_implementation": "eager"}  # the others know no float64
        self.model = AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float64, **eager)
        shape = read_shape(model_path)
        self.samples = tiny.samples(SAMPLES, self.model.config.vocab_size)
        self.routed = RoutedModel(self.model, tiny.with_routes(self.samples, shape.experts), shape.experts) if routes else None
        optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.0)
        with torch.no_grad():
            self.logps = [self.distribution(s)[0] for s in self.samples]
        self.differ = self.routed.differing / self.routed.total if routes else 0.0
        tiny.with_logprobs(self.samples, self.logps)
        self.losses, self.norms = [], []
        for step in range(2):
            optimizer.zero_grad()
            loss = self.loss(self.samples[step * PER_STEP : (step + 1) * PER_STEP])
            loss.backward()
            self.losses.append(loss.item())
            self.norms.append(sum(p.grad.square().sum() for p in self.model.parameters()).sqrt().item())
            if step == 0:
                self.gradients = published_tensors({n: p.grad.clone() for n, p in self.model.named_parameters()}, shape)
            optimizer.step()
        self.weights = published_tensors({n: p.detach() for n, p in self.model.named_parameters()}, shape)

    def distribution(self, s):
        tokens = torch.tensor([s.prompt.tokens + s.response.tolist()])
        if self.routed is not None:
            self.routed.routes = s.routes
        logp = self.model(tokens).logits[0, len(s.prompt.tokens) - 1 : -1].log_softmax(-1)
        return logp.gather(1, s.response[:, None])[:, 0], -(logp.exp() * logp).sum(-1)

    def loss(self, samples):
        per_sequence = []
        for s in samples:
            logp, entropy = self.distribution(s)
            ratio = (logp - s.old_logp).exp()
            clipped = ratio.clamp(1 - ALGO.clip.low, 1 + ALGO.clip.high)
            log_r = s.ref_logp - logp
            kl = log_r.exp() - 1 - log_r
            per_sequence.append(-torch.min(ratio * s.advantage, clipped * s.advantage) + ALGO.kl.coef * kl - ALGO.entropy * entropy)
        if self.aggregation == "token":
            return torch.cat(per_sequence).mean()
        return torch.stack([p.mean() for p in per_sequence]).mean()


class RoutedModel:
    """transformers' routers made to choose `routes` [T - 1, L_moe, K], if there are any; the weights are theirs, as their code has them."""

    def __init__(self, model, samples, experts):
        self.routes, self.differing, self.total = None, 0, 0
        for place, number in enumerate(i for i, is_sparse in enumerate(experts.layers) if is_sparse):
            block = model.model.layers[number].mlp
            if hasattr(block, "route_tokens_to_experts"):  # DeepSeek-V3
                block.route_tokens_to_experts = functools.partial(self.deepseek, block, block.route_tokens_to_experts, place)
            else:
                block.gate.register_forward_hook(functools.partial(self.qwen, place))

    def chosen(self, place, natural):
        if self.routes is None:
            return natural
        forced = self.routes[:, place].long()
        self.differing += int((forced[:, :, None] != natural[:-1, None]).all(2).sum())
        self.total += forced.numel()
        return torch.cat([forced, natural[-1:]])

    def qwen(self, place, gate, inputs, output):
        logits, _, natural = output
        chosen = self.chosen(place, natural)
        weights = logits.double().softmax(-1).gather(1, chosen)
        return logits, weights / weights.sum(-1, keepdim=True) if gate.norm_topk_prob else weights, chosen

    def deepseek(self, block, original, place, logits):
        chosen = self.chosen(place, original(logits)[0])
        weights = logits.sigmoid().gather(1, chosen)
        return chosen, weights / weights.sum(-1, keepdim=True) * block.routed_scaling_factor


def close(found: dict, expected: dict, tolerance: float) -> float:
    worst = max(float((found[n].double() - expected[n].double()).abs().max() / expected[n].double().abs().max()) for n in expected)
    assert found.keys() == expected.keys() and worst < tolerance, f"largest difference {worst:.2e} of the tensor's largest entry"
    return worst


def steps_of(model, out, ranks=1, tp=1, pp=1, micro=WHOLE, clip=NO_CLIP, extra=()):
    reports = run_ranks("one_step", ranks, model, str(tp), str(pp), str(micro), str(clip), str(out), *extra)
    for other in reports[1:]:
        assert other["first"] == reports[0]["first"], "every rank has the same metrics"
    logps = {k: v for r in reports for k, v in r["logps"].items()}
    return reports[0], logps, load_file(out / "gradients.safetensors"), load_file(out / "weights.safetensors")


@pytest.mark.parametrize(("family", "tied"), tiny.FAMILIES)
def test_against_plain_pytorch_in_float64(folder, tmp_path, family, tied):
    model = folder(family, tied)
    assert_is_plain_pytorch(model, steps_of(model, tmp_path))


def assert_is_plain_pytorch(model, found, routes=False):
    report, logps, gradients, weights = found
    plain = PlainPyTorch(model, routes=routes)
    if routes:
        assert report["routes"]["moe/routes_differ"] == plain.differ > 0.3, "of routes drawn at random, most"
    for s, expected in zip(plain.samples, plain.logps, strict=True):
        torch.testing.assert_close(torch.tensor(logps[f"{s.group}.{s.index}"], dtype=torch.float64), expected, rtol=1e-5, atol=1e-5)
    for step, found in enumerate((report["first"], report["second"])):
        assert found["train/loss"] == pytest.approx(plain.losses[step], rel=TOLERANCE[step], abs=TOLERANCE[step] / 10)
        assert found["train/grad_norm"] == pytest.approx(plain.norms[step], rel=TOLERANCE[step])
    assert 0 < report["first"]["train/clip_frac"] < 1, "the test must reach both branches of the clip"
    close(gradients, plain.gradients, 1e-4)
    # Adam's first steps move by lr * sign(gradient): an entry whose gradient is all but 0 may go either way, so the mean counts here
    moved = [float((weights[n].double() - w).abs().mean()) for n, w in plain.weights.items()]
    assert max(moved) < 2e-5


def test_sequence_mean_against_plain_pytorch(folder, tmp_path):
    model = folder("qwen2", True)
    report, _, gradients, _ = steps_of(model, tmp_path, micro=40, extra=("sequence",))
    plain = PlainPyTorch(model, "sequence")
    assert report["first"]["train/loss"] == pytest.approx(plain.losses[0], rel=1e-5, abs=1e-6)
    close(gradients, plain.gradients, 1e-4)


LAYOUTS = {
    "each sequence alone": dict(micro=1),
    "small packs": dict(micro=40),
    "tp=2": dict(ranks=2, tp=2),
    "tp=2, sequence parallel, small packs": dict(ranks=2, tp=2, micro=40, extra=("token", "sp")),
    "pp=2": dict(ranks=2, pp=2, micro=40),
    "dp=2, small packs": dict(ranks=2, micro=40, extra=("token", "overlap")),  # without overlap: in every test of the loop on two ranks
    "recomputed activations": dict(micro=40, extra=("token", "recompute")),
    "tp=2, pp=2": dict(ranks=4, tp=2, pp=2, micro=64),
    "pp=2, vpp=2": dict(ranks=2, pp=2, micro=64, extra=("token", "vpp=2")),
    "cp=2": dict(ranks=2, micro=64, extra=("token", "cp=2")),
}


@pytest.fixture(scope="module")
def one_rank(folder, tmp_path_factory):
    out = tmp_path_factory.mktemp("one")
    return {tied: steps_of(folder("qwen3", tied), out / str(tied), clip=1.0) for tied in (True, False)}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_gives_the_same_step(folder, tmp_path, one_rank, layout):
    tied = layout != "tp=2"
    assert_same_steps(steps_of(folder("qwen3", tied), tmp_path, clip=1.0, **LAYOUTS[layout]), one_rank[tied])


def assert_same_steps(found, expected):
    report, logps, _, weights = found
    expected, expected_logps, _, expected_weights = expected
    assert logps.keys() == expected_logps.keys()
    for name in logps:
        assert logps[name] == pytest.approx(expected_logps[name], abs=2e-5)
    for step, tolerance in zip(("first", "second"), TOLERANCE, strict=True):
        for metric in ("train/loss", "train/grad_norm", "train/entropy", "train/kl", "train/ref_kl"):
            assert report[step][metric] == pytest.approx(expected[step][metric], rel=tolerance, abs=tolerance / 10), metric
    moved = [float((weights[n] - w).abs().mean()) for n, w in expected_weights.items()]
    assert max(moved) < 2e-5
