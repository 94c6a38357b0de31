"""The actor on one GPU: kernels against float64 and against the plain path, nothing waited for in a micro batch, memory over sleeps."""

from __future__ import annotations

import pytest
import torch

from tests import tiny
from tests.ranks import run_ranks
from tests.unit.test_actor_kernels import worst
from tests.unit.test_actor_logprob import worst_of_head

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
FP32, BF16 = 5e-6, 2e-2  # largest difference of the largest entry; bf16 keeps 8 bits


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, FP32), (torch.bfloat16, BF16)])
def test_kernels_against_float64(dtype, tolerance):
    torch.backends.cuda.matmul.allow_tf32 = False
    found = worst(True, dtype, "cuda")
    found |= {f"head, entropy {e}": worst_of_head(True, e, dtype, "cuda") for e in (False, True)}
    print(found)
    assert max(found.values()) < tolerance, found


@pytest.fixture(scope="module")
def actor(tmp_path_factory):
    model = tiny.model_folder(tmp_path_factory.mktemp("actor") / "qwen3", "qwen3", True)
    made: dict[tuple[str, str], dict] = {}

    def run(dtype: str, kernels: str) -> dict:
        if (dtype, kernels) not in made:
            made[dtype, kernels] = run_ranks("actor_on_gpu", 1, model, dtype, kernels, timeout=280)[0]
        return made[dtype, kernels]

    return run


@pytest.mark.timeout(600)
@pytest.mark.parametrize(("dtype", "logp", "relative"), [("float32", 1e-4, 1e-3), ("bfloat16", 0.1, 0.02)])
def test_fused_and_plain_make_the_same_step(actor, dtype, logp, relative):
    fused, plain = actor(dtype, "fused"), actor(dtype, "plain")
    difference = (torch.tensor(fused["logps"]) - torch.tensor(plain["logps"])).abs()
    print(dtype, float(difference.max()), {n: (fused["stats"][n], plain["stats"][n]) for n in ("train/loss", "train/grad_norm")})
    assert float(difference.max()) < logp
    assert fused["stats"]["train/grad_norm"] == pytest.approx(plain["stats"]["train/grad_norm"], rel=relative)
    assert fused["stats"]["train/entropy"] == pytest.approx(plain["stats"]["train/entropy"], rel=relative)


@pytest.mark.timeout(600)
@pytest.mark.parametrize("kernels", ["fused", "plain"])
def test_nothing_is_waited_for_within_a_micro_batch(actor, kernels):
    assert actor("bfloat16", kernels)["waits"] == ""


@pytest.mark.timeout(600)
@pytest.mark.parametrize("mode", ["optimizer", "all"])
def test_memory_after_sleep_does_not_creep(actor, mode):
    found = actor("bfloat16", "fused")["memory"][mode]
    print(mode, found)
    assert found["same"], "weights and optimizer state are bitwise as before"
    assert max(found["allocated"]) - min(found["allocated"]) < 1, "from the first sleep to the last"
    assert max(found["reserved"]) - min(found["reserved"]) < 64
    assert found["allocated"][0] < found["awake"]
