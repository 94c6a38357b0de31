"""What SGLang derives from a sync's weights for latent attention follows them, where it lies."""

from __future__ import annotations

import importlib
import sys

import pytest
import torch

from megaflow.rollout import latent_attention

HEADS, NOPE, V, RANK = 3, 4, 2, 5


class Attention(torch.nn.Module):
    """The parts of SGLang's that count. w_kc and w_vc as its post_load_weights lays them out."""

    def __init__(self):
        super().__init__()
        self.qk_nope_head_dim, self.v_head_dim = NOPE, V
        self.kv_b_proj = torch.nn.Linear(RANK, HEADS * (NOPE + V), bias=False)
        self.w_kc = torch.zeros(HEADS, RANK, NOPE).transpose(1, 2)
        self.w_vc = torch.zeros(HEADS, V, RANK).transpose(1, 2)


def test_scores_and_values_through_the_derived_matrices_are_those_of_kv_b_proj():
    model = torch.nn.ModuleDict({"self_attn": Attention(), "mlp": torch.nn.Linear(2, 2)})
    attention, before = model["self_attn"], [model["self_attn"].w_kc.data_ptr(), model["self_attn"].w_vc.data_ptr()]
    latent_attention.refresh(model, proof=True)
    assert [attention.w_kc.data_ptr(), attention.w_vc.data_ptr()] == before, "CUDA graphs know the addresses"
    c, q = torch.randn(7, RANK), torch.randn(7, HEADS, NOPE)  # compressed tokens, queries
    k, v = attention.kv_b_proj(c).view(7, HEADS, NOPE + V).split([NOPE, V], -1)  # DeepSeek-V2, equations 10 and 11
    absorbed = torch.einsum("thn,hnr,sr->hts", q, attention.w_kc, c)
    torch.testing.assert_close(absorbed, torch.einsum("thn,shn->hts", q, k))
    torch.testing.assert_close(torch.einsum("sr,hrv->shv", c, attention.w_vc), v)


def test_what_did_not_follow_is_an_error():
    model = torch.nn.ModuleDict({"self_attn": Attention()})
    with torch.no_grad():
        model["self_attn"].kv_b_proj.weight[0, 0] = float("nan")  # equal to nothing, itself included
    with pytest.raises(ValueError, match="self_attn: w_kc and w_vc are not what kv_b_proj holds"):
        latent_attention.refresh(model, proof=True)


def test_functions_that_are_absent_may_be_imported_and_not_called(monkeypatch):
    monkeypatch.setattr(latent_attention, "SPARSE", "made_up_kernels")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    latent_attention.do_without_sparse_attention()
    from made_up_kernels import anything

    with pytest.raises(RuntimeError, match="made_up_kernels.anything needs nvidia-cutlass-dsl"):
        anything()
    del sys.modules["made_up_kernels"]
