"""Invariants 1 and 3 on CUDA, in bf16, on one GPU and on two. Skipped without a GPU.

Tolerances: bf16 keeps 8 bits, so a log-probability of size 5 is off by about 0.02; the test holds the mean under 0.03 and each under 0.3.
"""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import load_file

from tests import tiny
from tests.ranks import run_ranks

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
BF16 = {"TEST_DTYPE": "bfloat16"}
MEAN, EACH = 0.03, 0.3
two_gpus = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")

# ranks, actor tp, actor pp, engine tp, family, tied -> mode
SYNCS = {
    "one GPU": (1, 1, 1, 1, "qwen2", True, "direct"),
    "tp=2 to tp=2": (2, 2, 1, 2, "qwen3", True, "direct"),
    "tp=2 to tp=1": (2, 2, 1, 1, "llama", False, "gather"),
    "pp=2 to tp=1": (2, 1, 2, 1, "qwen2", True, "direct"),
    "pp=2 to tp=2": (2, 1, 2, 2, "qwen2", False, "gather"),
}


@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", SYNCS)
def test_engine_equals_transformers_and_trainer(name, tmp_path):
    ranks, tp, pp, engine_tp, family, tied, mode = SYNCS[name]
    if torch.cuda.device_count() < ranks:
        pytest.skip(f"needs {ranks} GPUs")
    model = tiny.model_folder(tmp_path / family, family, tied, layers=2)
    found = run_ranks("sync_matrix", ranks, model, str(tp), str(pp), str(engine_tp), timeout=500, env=BF16)
    print(name, [(r["transformers"], r["trainer"], r["stats"]["sync/gb_per_s"]) for r in found[0]["rounds"]])
    for rank in found:
        assert rank["mode"] == mode
        assert all("ProofError" in text and f"pipeline stage {pp - 1}" in text for text in rank["flipped"])
        for r in rank["rounds"]:
            assert r["stats"]["sync/proof"] == 1.0
            for largest, mean in (r["transformers"], r["trainer"]):
                assert mean < MEAN and largest < EACH


LAYOUTS = {
    "each sequence alone": (1, 1, 1, 1),
    "small packs": (1, 1, 1, 40),
    "tp=2": (2, 2, 1, 4096),
    "pp=2": (2, 1, 2, 40),
    "dp=2": (2, 1, 1, 40),
}


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    base = tmp_path_factory.mktemp("one")
    model = tiny.model_folder(base / "qwen3", "qwen3", True)
    out = base / "out"
    return model, run_ranks("one_step", 1, model, "1", "1", "4096", "1.0", str(out), env=BF16)[0], load_file(out / "weights.safetensors")


@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", LAYOUTS)
def test_every_layout_gives_the_same_step(name, whole, tmp_path):
    ranks, tp, pp, micro = LAYOUTS[name]
    if torch.cuda.device_count() < ranks:
        pytest.skip(f"needs {ranks} GPUs")
    model, expected, weights = whole
    found = run_ranks("one_step", ranks, model, str(tp), str(pp), str(micro), "1.0", str(tmp_path), env=BF16)[0]
    for step in ("first", "second"):
        for metric in ("train/loss", "train/grad_norm", "train/entropy", "train/ref_kl"):
            print(name, step, metric, found[step][metric], expected[step][metric])
            assert found[step][metric] == pytest.approx(expected[step][metric], rel=0.02, abs=0.01), metric
    moved = load_file(tmp_path / "weights.safetensors")
    assert max(float((moved[n].float() - w.float()).abs().mean()) for n, w in weights.items()) < 1e-3
