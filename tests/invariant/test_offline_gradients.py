"""SFT and DPO on two tensor-parallel and two data-parallel ranks against autograd of the published formulas: float64, transformers' model.

The pairs' two sequences lie in different packs, and under data parallelism some on different ranks.
"""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests import tiny
from tests.programs.offline_gradients import OFFLINE, STRETCH, made
from tests.ranks import PROGRAMS, launch


class Published:
    """Loss and gradients of one objective; the policy is `model` with all weights times STRETCH, the reference `model` itself."""

    def __init__(self, model: str):
        from transformers import AutoModelForCausalLM

        self.policy, self.reference = (
            AutoModelForCausalLM.from_pretrained(model, dtype=torch.float64, attn_implementation="eager") for _ in range(2)
        )
        with torch.no_grad():
            for p in self.policy.parameters():
                p.mul_(STRETCH)
        self.samples = made(self.policy.config.vocab_size)

    def logp(self, model, s) -> torch.Tensor:
        tokens = torch.tensor([s.prompt.tokens + s.response.tolist()])
        logp = model(tokens).logits[0, len(s.prompt.tokens) - 1 : -1].log_softmax(-1)
        return logp.gather(1, s.response[:, None])[:, 0]

    def sft(self) -> torch.Tensor:
        return -torch.cat([self.logp(self.policy, s) for s in self.samples]).mean()

    def dpo(self) -> torch.Tensor:
        ratio = [self.logp(self.policy, s).sum() - self.logp(self.reference, s).sum().detach() for s in self.samples]
        h = OFFLINE.beta * torch.stack([chosen - rejected for chosen, rejected in zip(ratio[::2], ratio[1::2], strict=True)])
        e = OFFLINE.label_smoothing
        self.margin, self.accuracy = float(h.mean()), float((h > 0).double().mean())
        return (-(1 - e) * torch.log(torch.sigmoid(h)) - e * torch.log(torch.sigmoid(-h))).mean()

    def gradients(self, loss: torch.Tensor) -> dict[str, torch.Tensor]:
        self.policy.zero_grad()
        loss.backward()
        return {n: p.grad.clone() for n, p in self.policy.named_parameters()}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return tiny.model_folder(tmp_path_factory.mktemp("model") / "tiny", "qwen2", True, layers=2)


@pytest.fixture(scope="module")
def out(model: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("out")
    code, output = launch([str(PROGRAMS / "offline_gradients.py"), model, str(folder)], 1, timeout=120)
    assert code == 0, output[-5000:]
    return folder


@pytest.mark.parametrize("layout", ["tp2", "dp2"])
@pytest.mark.parametrize("objective", ["sft", "dpo"])
def test_loss_and_gradients(model: str, out: Path, objective: str, layout: str) -> None:
    """Gradients to 1e-4 of each tensor's largest entry, fp32 against float64."""
    published = Published(model)
    loss = getattr(published, objective)()
    expected = published.gradients(loss)
    stats = json.loads((out / f"{layout}_{objective}.json").read_text())
    assert stats["train/loss"] == pytest.approx(float(loss), rel=1e-5)
    norm = math.sqrt(sum(float(g.square().sum()) for g in expected.values()))
    assert stats["train/grad_norm"] == pytest.approx(norm, rel=1e-5)
    found = load_file(out / f"{layout}_{objective}.safetensors")
    assert found.keys() == expected.keys()
    for name, gradient in expected.items():
        worst = float((found[name].double() - gradient).abs().max() / gradient.abs().max())
        assert worst < 1e-4, f"{name}: {worst:.1e}"
    if objective == "dpo":
        assert (stats["dpo/margin"], stats["dpo/accuracy"]) == pytest.approx((published.margin, published.accuracy), abs=1e-5)
        assert 0 < published.accuracy < 1, "pairs of both kinds"
