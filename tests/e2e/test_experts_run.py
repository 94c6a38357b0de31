"""The whole program with a mixture of experts: GRPO on two ranks that hold half of the experts each, transformers generating, its routes
replayed. Groups that are left over wait for the next step, with their routes."""

from __future__ import annotations

from pathlib import Path

import pytest
from safetensors.torch import load_file

from tests.e2e.program import TRAIN, metrics, run, write_config
from tools.make_tiny_model import make


@pytest.mark.timeout(560)
def test_grpo_with_ep_2(tmp_path: Path) -> None:
    make(tmp_path / "model", family="qwen3_moe", hidden=64, tied=False, data=tmp_path / "data")
    path = write_config(
        tmp_path / "experts.yaml", tmp_path, run={"steps": 2, "export_hf": True}, parallel={"tp": 1, "ep": 2},
        data={"max_prompt_tokens": 64}, eval={"before": False, "after": False}, actor={"router_replay": "R3"},
    )  # fmt: skip
    code, output = run(tmp_path, 2, TRAIN, "--config", path, timeout=500)
    assert code == 0, output[-5000:]
    lines = metrics(tmp_path / "runs/experts")
    assert [m["step"] for m in lines] == [1, 2]
    assert all(m["sync/proof"] == 1 and m["mismatch/logp_abs_diff"] < 1e-5 and m["train/grad_norm"] > 0 for m in lines)
    assert all(0 <= m["moe/routes_differ"] < 1e-3 for m in lines), "in fp32 both choose alike, but for scores equal to their last bits"
    before, after = load_file(tmp_path / "model/model.safetensors"), load_file(tmp_path / "runs/experts/hf/model.safetensors")
    assert before.keys() == after.keys()
    moved = [n for n in before if ".experts." in n and not before[n].equal(after[n])]
    assert {n.split(".experts.")[1][0] for n in moved} == {"0", "1", "2", "3"}, "experts of both ranks have learnt"
