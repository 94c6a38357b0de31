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


def test_an_engine_in_fp32_says_what_transformers_says(tmp_path):
    """SGLang's attention multiplies fp32 as TF32, with 10 bits of mantissa."""
    model = tiny.model_folder(tmp_path / "qwen3", "qwen3", True, layers=2)
    (found,) = run_ranks("sync_matrix", 1, model, "1", "1", "1", timeout=500, env={"TEST_DTYPE": "float32"})
    print([(r["transformers"], r["trainer"]) for r in found["rounds"]])
    assert all(mean < 2e-3 for r in found["rounds"] for _, mean in (r["transformers"], r["trainer"]))


# ranks, tp, pp, tokens of a pack, the rest as one_step takes it
LAYOUTS = {
    "each sequence alone": (1, 1, 1, 1, ()),
    "small packs": (1, 1, 1, 40, ()),
    "tp=2": (2, 2, 1, 4096, ()),
    "tp=2, sequence parallel, recomputed": (2, 2, 1, 64, ("sp", "recompute")),
    "pp=2": (2, 1, 2, 40, ()),
    "pp=2, vpp=2": (2, 1, 2, 40, ("vpp=2",)),
    "cp=2": (2, 1, 1, 64, ("cp=2",)),
    "dp=2": (2, 1, 1, 40, ()),
}
MIXED = {
    "grouped": (1, 1, 1, 64, ("grouped",)),
    "ep=2, grouped": (2, 1, 1, 64, ("ep=2", "grouped")),
    "ep=2, cp=2, grouped": (2, 1, 1, 64, ("ep=2", "cp=2", "grouped")),
    "tp=2, etp=2, sequence parallel": (2, 2, 1, 64, ("sp", "etp=2")),
}


def step_of(model: str, ranks: int, tp: int, pp: int, micro: int, extra: tuple[str, ...], out) -> tuple[dict, dict]:
    """(what rank 0 reports of tests/programs/one_step.py, the weights after both steps)."""
    arguments = (model, str(tp), str(pp), str(micro), "1.0", str(out), "token", *extra)
    return run_ranks("one_step", ranks, *arguments, env=BF16)[0], load_file(out / "weights.safetensors")


def assert_same(name: str, found: tuple[dict, dict], expected: tuple[dict, dict]) -> None:
    for step in ("first", "second"):
        for metric in ("train/loss", "train/grad_norm", "train/entropy", "train/ref_kl"):
            mine, its = (report[step][metric] for report, _ in (found, expected))
            print(name, step, metric, mine, its)
            assert mine == pytest.approx(its, rel=0.02, abs=0.01), metric
    assert max(float((found[1][n].float() - w.float()).abs().mean()) for n, w in expected[1].items()) < 1e-3


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """family -> (folder, extra arguments, its steps on one rank). Experts of forced routes: rounding then changes none."""
    found = {}
    for family, extra in (("qwen3", ()), ("qwen3_moe", ("routes",))):
        base = tmp_path_factory.mktemp(family)
        model = tiny.model_folder(base / family, family, family == "qwen3")
        found[family] = (model, extra, step_of(model, 1, 1, 1, 4096, extra, base / "out"))
    return found


@pytest.mark.timeout(300)
@pytest.mark.parametrize(("family", "name"), [*(("qwen3", n) for n in LAYOUTS), *(("qwen3_moe", n) for n in MIXED)])
def test_every_layout_gives_the_same_step(family, name, whole, tmp_path):
    ranks, tp, pp, micro, extra = (LAYOUTS | MIXED)[name]
    if torch.cuda.device_count() < ranks:
        pytest.skip(f"needs {ranks} GPUs")
    model, always, expected = whole[family]
    assert_same(name, step_of(model, ranks, tp, pp, micro, (*always, *extra), tmp_path), expected)
