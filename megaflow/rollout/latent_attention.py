"""What SGLang 0.5.15 needs for DeepSeek-V3's latent attention, beside the weights that a sync writes. Hooked by sglang_plugin.py and called
by engine_loader.py.

It decodes with `w_kc` and `w_vc`, which are cut out of `kv_b_proj` once, after loading: no parameters, so no sync would bring them.
"""

from __future__ import annotations

import importlib.util
import sys
import types
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

SPARSE = "sglang.jit_kernel.dsa"
# The published config.json says them; a folder that transformers has saved from its own defaults does not, and SGLang reads them.
ROUTING = {"topk_method": "noaux_tc", "scoring_func": "sigmoid", "moe_layer_freq": 1}


def do_without_sparse_attention() -> None:
    """Its model file imports the kernels of DeepSeek-V3.2's sparse attention, which need nvidia-cutlass-dsl; without that SGLang takes
    transformers' model in its place, whose attention it cannot serve, without a word."""
    if importlib.util.find_spec("cutlass") is None and SPARSE not in sys.modules:
        sys.modules[SPARSE] = _Absent(SPARSE)


class _Absent(types.ModuleType):
    """A module whose functions may be imported and not called."""

    __path__: list[str] = []

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)

        def absent(*_: Any, **__: Any) -> None:
            raise RuntimeError(f"{self.__name__}.{name} needs nvidia-cutlass-dsl")

        return absent


def rotary_on_cpu(original: Any, head_size: int, dim: int, positions: int, base: float, is_neox: bool, scaling: Any, *rest: Any) -> Any:
    """An AROUND hook of `get_rope_cpu`, which takes nothing but yarn; what it is asked for without scaling is the usual module."""
    if scaling is not None:
        return original(head_size, dim, positions, base, is_neox, scaling, *rest)
    from sglang.srt.layers.rotary_embedding import get_rope

    return get_rope(head_size, dim, positions, base, is_neox, None)


def refresh(model: torch.nn.Module, proof: bool) -> None:
    """After `kv_b_proj` was written: the same values in `w_kc` and `w_vc`, in place, since CUDA graphs know their addresses.

    Raises ValueError, with `proof`, when they are not the same.
    """
    for name, attention in absorbing(model):
        pairs = list(zip((attention.w_kc, attention.w_vc), _halves(attention), strict=True))
        for derived, source in pairs:
            derived.copy_(source)
        if proof and not all(torch.equal(derived, source) for derived, source in pairs):
            raise ValueError(f"{name}: w_kc and w_vc are not what kv_b_proj holds")


def absorbing(model: torch.nn.Module) -> Iterator[tuple[str, torch.nn.Module]]:
    return ((name, m) for name, m in model.named_modules() if getattr(m, "w_kc", None) is not None and hasattr(m, "kv_b_proj"))


def _halves(attention: torch.nn.Module) -> tuple[Tensor, Tensor]:
    """kv_b_proj [heads * (nope + v), rank] -> w_kc [heads, nope, rank], w_vc [heads, rank, v]; views."""
    dims = [attention.qk_nope_head_dim, attention.v_head_dim]
    kc, vc = attention.kv_b_proj.weight.detach().unflatten(0, (-1, sum(dims))).split(dims, 1)
    return kc, vc.transpose(1, 2)
