"""What travels between ranks arrives as it was, and no more of it than was sent."""

from __future__ import annotations

import pytest
import torch

from megaflow.parallel.comm import _from_bytes, _to_bytes
from megaflow.types import Prompt, Sample

TENSORS = {
    "tokens": torch.arange(5),
    "logp": torch.tensor([-0.1, float("nan"), float("-inf")]),
    "bfloat16": torch.arange(3, dtype=torch.bfloat16),
    "bool": torch.tensor([True, False]),
    "uint8": torch.arange(12, dtype=torch.uint8).view(2, 3, 2),
    "transposed": torch.arange(6.0).view(2, 3).t(),
    "empty": torch.zeros(0, dtype=torch.int16),
    "scalar": torch.tensor(2.5, dtype=torch.float64),
}


@pytest.mark.parametrize("name", TENSORS)
def test_a_tensor_arrives_as_it_was_and_can_be_written_to(name: str) -> None:
    sent = TENSORS[name]
    found = _from_bytes(_to_bytes(sent))
    assert found.dtype == sent.dtype and found.shape == sent.shape
    assert torch.equal(found.float().nan_to_num(nan=7.0), sent.float().nan_to_num(nan=7.0))
    before = sent.clone()
    found.zero_()
    assert torch.equal(sent.float().nan_to_num(nan=7.0), before.float().nan_to_num(nan=7.0))


def test_of_a_view_its_own_part_travels() -> None:
    assert len(_to_bytes(torch.zeros(1_000_000)[5:8])) < 1000


def test_a_tensor_with_a_gradient_keeps_its_flag() -> None:
    assert _from_bytes(_to_bytes(torch.ones(2, requires_grad=True))).requires_grad


def test_samples_of_a_prompt_share_it_again() -> None:
    prompt = Prompt("a:1", [1, 2], "text", answer={"a": 1})
    routes = torch.ones(4, 2, 2, dtype=torch.uint8)
    sent = [Sample(prompt, 0, i, torch.arange(3), torch.zeros(3), "stop", 1, routes=routes) for i in range(2)]
    found = _from_bytes(_to_bytes(sent))
    assert found[0].prompt is found[1].prompt and found[0].prompt == prompt
    for mine, its in zip(found, sent, strict=True):
        assert torch.equal(mine.response, its.response) and torch.equal(mine.routes, its.routes) and mine.num_response == 3
