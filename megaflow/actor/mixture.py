"""Megatron-core's settings of a mixture of experts, so that its router does what transformers' does."""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.transformer.moe.router import TopKRouter

from megaflow.config.schema import ParallelConfig
from megaflow.shape import ModelShape


def moe_settings(shape: ModelShape, parallel: ParallelConfig) -> dict[str, Any]:
    """Fields of TransformerConfig; {} for a dense model.

    No auxiliary loss: it would pull the policy towards balance while the reward pulls elsewhere. The experts' bias stays as it was
    pretrained for the same reason.
    """
    e = shape.experts
    if e is None:
        return {}
    return {
        "num_moe_experts": e.count,
        "moe_router_topk": e.top_k,
        "moe_ffn_hidden_size": e.ffn_size,
        "moe_layer_freq": [int(sparse) for sparse in e.layers],
        "moe_shared_expert_intermediate_size": e.shared_ffn_size or None,
        "moe_shared_expert_gate": e.shared_gate,
        "moe_router_score_function": e.score,
        # softmax over the chosen scores alone is softmax over all, divided by the sum of the chosen; else it must come first
        "moe_router_pre_softmax": e.score == "softmax" and not e.normalize,
        "moe_router_topk_scaling_factor": None if e.scale == 1.0 else e.scale,
        "moe_router_num_groups": e.groups if e.groups > 1 else None,
        "moe_router_group_topk": e.top_groups if e.groups > 1 else None,
        "moe_router_enable_expert_bias": e.bias,
        "moe_router_bias_update_rate": 0.0,
        "moe_router_dtype": "fp32" if e.score == "sigmoid" else None,  # as transformers: DeepSeek-V3 in fp32, the others as the model
        "moe_router_load_balancing_type": "none",
        "moe_aux_loss_coeff": 0.0,
        "expert_model_parallel_size": parallel.ep,
        "expert_tensor_parallel_size": parallel.etp,
    }


def keep_expert_bias_exact(model: torch.nn.Module) -> None:
    """A model made 16-bit has rounded its buffers; the bias decides between nearly equal scores and is published in fp32."""
    for router in routers(model):
        router._maintain_float32_expert_bias()


def routers(model: torch.nn.Module) -> list[TopKRouter]:
    return [m for m in model.modules() if isinstance(m, TopKRouter)]
