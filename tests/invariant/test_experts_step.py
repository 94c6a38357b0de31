"""Invariant 1 for mixtures of experts: one step equals transformers' in float64, and is the same wherever the experts lie."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import load_file

from tests import tiny
from tests.invariant.test_one_step import assert_is_plain_pytorch, assert_same_steps, steps_of

NO_CLIP = 0.0


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    base = tmp_path_factory.mktemp("models")
    return lambda family: tiny.model_folder(base / family, family, tied=False)


@pytest.fixture(scope="module")
def one_rank(folder, tmp_path_factory):
    return steps_of(folder("qwen3_moe"), tmp_path_factory.mktemp("one"), clip=NO_CLIP)


def test_qwen3_moe_against_plain_pytorch_in_float64(folder, one_rank):
    assert_is_plain_pytorch(folder("qwen3_moe"), one_rank)


LAYOUTS = {
    "ep=2": dict(ranks=2, extra=("token", "ep=2")),
    "ep=2, tp=2, sequence parallel": dict(ranks=4, tp=2, micro=64, extra=("token", "sp", "ep=2")),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_experts_on_other_ranks_give_the_same_step(folder, one_rank, tmp_path, layout):
    assert_same_steps(steps_of(folder("qwen3_moe"), tmp_path, clip=NO_CLIP, **LAYOUTS[layout]), one_rank)


def test_deepseek_against_plain_pytorch_in_float64_and_its_bias_stays(folder, tmp_path):
    report, logps, gradients, weights = steps_of(folder("deepseek_v3"), tmp_path, clip=NO_CLIP)
    published = load_file(f"{folder('deepseek_v3')}/model.safetensors")
    biases = [name for name in published if name.endswith("e_score_correction_bias")]
    assert len(biases) == 3
    for name in biases:
        assert torch.equal(weights.pop(name), published[name]) and gradients.pop(name).numel() == 8
    assert_is_plain_pytorch(folder("deepseek_v3"), (report, logps, gradients, weights))
