"""Experts on CPU: those of an engine that divides them over its ranks (rollout.ep), and a shared expert's gate. Hooked by sglang_plugin.py;
needed for sglang 0.5.15.

SGLang's loop over experts for CPUs does not expect that a token's expert lies on another rank (-1 among the chosen ones): an index error.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


def own_experts(original: Any, layer: torch.nn.Module, x: Tensor, topk_output: Any, config: Any) -> Tensor:
    """An AROUND hook of `moe_forward_native`: [T, H] -> [T, H], the part of this rank's experts; SGLang adds up the ranks' parts."""
    if layer.moe_ep_size == 1:
        return original(layer, x, topk_output, config)
    assert config.activation == "silu", config.activation
    return weighted_sum(x, topk_output[0], topk_output[1], layer.w13_weight, layer.w2_weight)


def weighted_sum(x: Tensor, weights: Tensor, chosen: Tensor, w13: Tensor, w2: Tensor) -> Tensor:
    """x [T, H], weights and chosen [T, k] (numbers among this rank's experts, -1: elsewhere), w13 [E, 2 F, H], w2 [E, H, F] -> [T, H]."""
    out = torch.zeros_like(x)
    for number in range(w13.shape[0]):
        tokens, slots = (chosen == number).nonzero(as_tuple=True)
        if len(tokens):
            gate, up = F.linear(x[tokens], w13[number]).chunk(2, -1)
            y = F.linear(F.silu(gate) * up, w2[number])
            out.index_add_(0, tokens, y * weights[tokens, slots, None].to(y.dtype))
    return out


def add_gated(x: Tensor, gate: Tensor, shared: Tensor, total: Tensor) -> None:
    """In the place of `fused_gate_sigmoid_mul_add`, a Triton kernel: total [T, H] += sigmoid(x [T, H] @ gate [H]) * shared [T, H]."""
    total.addcmul_(torch.sigmoid(x @ gate)[:, None], shared)
