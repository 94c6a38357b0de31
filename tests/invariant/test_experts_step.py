"""Invariant 1 for mixtures of experts: one step equals transformers' in float64, and is the same wherever the experts lie.

Three samples of four come with routes drawn at random, which both sides follow; of the others the routers choose.
"""

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
    return steps_of(folder("qwen3_moe"), tmp_path_factory.mktemp("one"), clip=NO_CLIP, extra=("token", "routes"))


def test_qwen3_moe_against_plain_pytorch_in_float64(folder, one_rank):
    assert_is_plain_pytorch(folder("qwen3_moe"), one_rank, routes=True)


LAYOUTS = {
    "ep=2, cp=2, grouped": dict(ranks=2, micro=64, extra=("token", "routes", "ep=2", "cp=2", "grouped")),
    "tp=2, etp=2, grouped, small packs": dict(ranks=2, tp=2, micro=64, extra=("token", "routes", "sp", "etp=2", "grouped", "recompute")),
    "ep=2, tp=2, sequence parallel": dict(ranks=4, tp=2, micro=64, extra=("token", "routes", "sp", "ep=2")),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_experts_on_other_ranks_give_the_same_step(folder, one_rank, tmp_path, layout):
    found = steps_of(folder("qwen3_moe"), tmp_path, clip=NO_CLIP, **LAYOUTS[layout])
    assert_same_steps(found, one_rank)
    assert found[0]["routes"] == one_rank[0]["routes"]


def test_deepseek_against_plain_pytorch_in_float64_and_its_bias_stays(folder, tmp_path):
    """In four chunks of a layer on two stages: each has its own part of a route, and none for the dense layer."""
    layout = dict(ranks=2, pp=2, micro=64, extra=("token", "routes", "replicated", "vpp=2", "recompute"))
    report, logps, gradients, weights = steps_of(folder("deepseek_v3"), tmp_path, clip=NO_CLIP, **layout)
    published = load_file(f"{folder('deepseek_v3')}/model.safetensors")
    biases = [name for name in published if name.endswith("e_score_correction_bias")]
    assert len(biases) == 3
    for name in biases:
        assert torch.equal(weights.pop(name), published[name]) and gradients.pop(name).numel() == 8
    assert_is_plain_pytorch(folder("deepseek_v3"), (report, logps, gradients, weights), routes=True)
