"""Invariant 2: HF -> Megatron -> HF is bitwise for every family, wherever its layers, heads, vocabulary and experts lie."""

from __future__ import annotations

import pytest

from tests import tiny
from tests.ranks import run_ranks

FAMILIES = [("qwen2", True), *tiny.MIXTURES]  # the other dense ones differ in no kind of parameter; test_weights.py has them all


@pytest.mark.timeout(300)
def test_every_family_comes_back_bitwise_from_every_layout(tmp_path):
    for family, tied in FAMILIES:
        tiny.model_folder(tmp_path / f"{family}-{tied}", family, tied)
    for report in run_ranks("families", 4, str(tmp_path), timeout=280):
        assert len(report["differing"]) == 5 * len(FAMILIES)
        assert not {layout: names for layout, names in report["differing"].items() if names}
