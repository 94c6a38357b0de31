"""The examples of the pages on adding a reward, an algorithm and a backend: what they compute, and that pages quote them as they are.

Their configurations pass a dry run in test_docs_commands.py; the backend generates in tests/dist/test_rollout.py.
"""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch

from megaflow.algo import ADVANTAGES, LOSSES
from megaflow.algo.losses import LossInputs
from megaflow.config.schema import AlgoConfig, RewardConfig, RewardFunctionConfig
from megaflow.rewards import REWARDS, RewardPool
from megaflow.types import Prompt, Sample
from tests.pages import ROOT, blocks

EXAMPLES = ROOT / "docs/examples"
PAGES = {"adding-a-reward.md": "units_reward.py", "adding-an-algorithm.md": "median_advantage.py"}


@pytest.mark.parametrize(("page", "example"), PAGES.items())
def test_pages_quote_the_examples(page: str, example: str) -> None:
    quoted = {language: "\n".join(lines) for language, lines in blocks(ROOT / "docs" / page)}
    assert quoted["python"] in (EXAMPLES / example).read_text()
    config = EXAMPLES / {"units_reward.py": "units.yaml", "median_advantage.py": "median.yaml"}[example]
    assert quoted["yaml"] in config.read_text()
    if "json" in quoted:
        assert quoted["json"] in (EXAMPLES / "units.jsonl").read_text().splitlines()


def test_the_page_on_models_quotes_a_family() -> None:
    quoted = next(lines for language, lines in blocks(ROOT / "docs/adding-a-model.md") if language == "python")
    assert "\n".join(quoted) in (ROOT / "megaflow/weights/families/mixtral.py").read_text()


def test_median_by_hand() -> None:
    """Groups interleaved: of 0, 0.5, 1 the median is 0.5; of 0, 1 it is 0.5; of 1, 1, 1, 0 it is 1."""
    rewards = torch.tensor([0.0, 1.0, 0.0, 1.0, 0.5, 1.0, 1.0, 1.0, 0.0])
    groups = torch.tensor([7, 2, 2, 9, 7, 9, 9, 7, 9])
    advantages = ADVANTAGES.get(f"{EXAMPLES}/median_advantage.py:median")(rewards, groups, AlgoConfig())
    assert advantages.tolist() == [-0.5, 0.5, -0.5, 0.0, 0.0, 0.0, 0.0, 0.5, -1.0]


def test_flattened_by_hand() -> None:
    """Value -A h tanh((r - 1) / h) and gradient -A r / cosh^2((r - 1) / h) with respect to logp, h = 0.2; at r = 1 the gradient is -A."""
    loss = LOSSES.get(f"{EXAMPLES}/median_advantage.py:flattened")
    ratio, advantage = [1.0, 1.5, 0.7], torch.tensor([2.0, 1.0, -1.0], dtype=torch.float64)
    old = torch.tensor([-1.0, -2.0, -0.5], dtype=torch.float64)
    logp = (old + torch.tensor(ratio, dtype=torch.float64).log()).requires_grad_()
    inputs = LossInputs(old, advantage, old, torch.tensor([0, 0, 1]), 2)
    per_token, figures = loss(logp, inputs, AlgoConfig())
    per_token.sum().backward()
    pairs = list(zip(advantage.tolist(), ratio, strict=True))
    assert per_token.tolist() == pytest.approx([-a * 0.2 * math.tanh((r - 1) / 0.2) for a, r in pairs])
    slopes = [-a * r / math.cosh((r - 1) / 0.2) ** 2 for a, r in pairs]
    assert logp.grad.tolist() == pytest.approx(slopes) and slopes[0] == -2.0
    assert figures["ratio"].tolist() == pytest.approx(ratio) and figures["flat"].tolist() == [0.0, 1.0, 1.0]
    assert not any(figure.requires_grad for figure in figures.values())


def test_units_by_hand() -> None:
    quantity = REWARDS.get(f"{EXAMPLES}/units_reward.py:quantity")
    asked = Prompt("units:0", [], "How far?", answer=30, meta={"unit": "km"})
    by_hand = {"30 km": 1.0, "60 km / 2 = 30.0 km": 1.0, "30km": 1.0, "30 m": 0.5, "30": 0.0, "3 km": 0.0, "30 km or 31 km": 0.0, "": 0.0}
    assert {text: quantity(text, 30, asked) for text in by_hand} == by_hand
    assert quantity("30 m", 30, asked, wrong_unit=0.3) == 0.3
    assert [quantity.find_answer(text, 30, asked) for text in ("30 km", "so 30.0 km", "none")] == ["30 km", "30 km", None]


def test_units_in_a_worker_with_the_datas_column(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    line = json.loads(Path("docs/examples/units.jsonl").read_text().splitlines()[1])
    asked = Prompt("units:1", [], line["prompt"], answer=line["answer"], meta={"unit": line["unit"]})
    texts = ["500 g", "500 kg", "no idea"]
    samples = [Sample(asked, 0, i, None, None, "stop", 0, text=text) for i, text in enumerate(texts)]
    function = RewardFunctionConfig("docs/examples/units_reward.py:quantity", options={"wrong_unit": 0.3})
    with RewardPool(RewardConfig(functions=[function], workers=1)) as pool:
        assert [scored.reward for scored in pool.score(samples)] == [1.0, 0.3, 0.0]
