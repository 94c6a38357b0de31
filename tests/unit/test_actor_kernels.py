"""The Triton kernels, in Triton's interpreter, and the plain paths, against float64 written from the papers."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parent.parent.parent


def norm(x, weight):
    return x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt() * weight


def gated(x):
    gate, up = x[..., : x.shape[-1] // 2], x[..., x.shape[-1] // 2 :]
    return gate / (1 + (-gate).exp()) * up


def turned(x, positions, angles):
    """As complex numbers: (x_i + j x_{i + d/2}) e^{j angle}."""
    half = x.shape[-1] // 2
    z = torch.complex(x[..., :half], x[..., half:]) * torch.polar(torch.ones_like(angles), angles)[positions][:, None]
    return torch.cat((z.real, z.imag), -1)


def cases(device: str = "cpu"):
    """name -> (inputs with gradients, ours(fused, *inputs), the paper's)."""
    from megaflow.actor import fused as ops

    g = torch.Generator().manual_seed(0)

    def draw(*shape):
        return torch.randn(*shape, generator=g).to(device)

    angles = draw(9, 8).double() * 3
    cos, sin = angles.cos().float(), angles.sin().float()
    positions = torch.tensor([0, 1, 2, 3, 0, 1, 8, 3], device=device)
    return {
        "norm": ([draw(5, 1, 96), draw(96)], lambda f, x, w: ops.rms_norm(x, w, 1e-6, f), norm),
        "norm of heads": ([draw(7, 1, 3, 16), draw(16)], lambda f, x, w: ops.rms_norm(x, w, 1e-6, f), norm),
        "swiglu": ([draw(6, 1, 2 * 70)], lambda f, x: ops.swiglu(x, f), gated),
        "rotary": ([draw(8, 3, 16)], lambda f, x: ops.rotary(x, positions, cos, sin, f), lambda x: turned(x, positions, angles)),
        "rotary of a slice": (
            [draw(8, 3, 40)],
            lambda f, x: ops.rotary(x[..., 8:24], positions, cos, sin, f),
            lambda x: turned(x[..., 8:24], positions, angles),
        ),
    }


def worst(fused: bool, dtype: torch.dtype, device: str = "cpu") -> dict[str, float]:
    """Largest difference of outputs and gradients, relative to each tensor's largest entry."""
    found = {}
    for name, (inputs, ours, paper) in cases(device).items():
        mine = [x.to(dtype).requires_grad_() for x in inputs]
        exact = [x.detach().double().requires_grad_() for x in mine]
        y, expected = ours(fused, *mine), paper(*exact)
        weights = torch.randn(y.shape, generator=torch.Generator().manual_seed(1)).to(device, dtype)
        y.backward(weights)
        expected.backward(weights.double())
        pairs = [(y, expected), *((a.grad, b.grad) for a, b in zip(mine, exact, strict=True))]
        found[name] = max(float((a.double() - b).abs().max() / b.abs().max()) for a, b in pairs)
    return found


TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 2e-2}  # bf16 keeps 8 bits: 2^-8 for each of a few roundings


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_plain(dtype):
    found = worst(False, dtype)
    assert max(found.values()) < TOLERANCE[dtype], found


def test_fused_in_the_interpreter():
    """In a process of its own: Triton reads TRITON_INTERPRET when it is imported."""
    env = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, __file__], env=env, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert set(found) == set(cases()) | {"logp", "logp, entropy"}
    assert max(found.values()) < TOLERANCE[torch.float32], found


def interpreted() -> None:
    from tests.unit.test_actor_logprob import worst_of_head

    found = worst(True, torch.float32) | {"logp": worst_of_head(True, False), "logp, entropy": worst_of_head(True, True)}
    print(json.dumps(found))


if __name__ == "__main__":
    interpreted()
