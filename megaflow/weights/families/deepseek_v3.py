"""DeepSeek-V3: latent attention; after the first dense layers, experts chosen by sigmoid scores plus a bias, and a shared expert.

The layer for multi-token prediction, which the published folders carry behind the last one, is left out, as transformers does.
"""

from __future__ import annotations

from typing import Any

from megaflow.shape import Experts, Latent, plain_attention, rope_settings, rope_type
from megaflow.weights.families import Family, Names


def read(raw: dict[str, Any]) -> dict[str, Any]:
    latent = Latent(
        q_rank=raw.get("q_lora_rank"),
        kv_rank=raw["kv_lora_rank"],
        nope_dim=raw["qk_nope_head_dim"],
        rope_dim=raw["qk_rope_head_dim"],
        value_dim=raw["v_head_dim"],
    )
    layers, dense = raw["num_hidden_layers"], raw.get("first_k_dense_replace", 0)
    experts = Experts(
        count=raw["n_routed_experts"],
        top_k=raw["num_experts_per_tok"],
        ffn_size=raw["moe_intermediate_size"],
        layers=tuple(i >= dense for i in range(layers)),
        shared_ffn_size=raw["moe_intermediate_size"] * raw["n_shared_experts"],
        score="sigmoid",
        scale=raw.get("routed_scaling_factor", 1.0),
        groups=raw.get("n_group") or 1,
        top_groups=raw.get("topk_group") or 1,
        bias=True,
    )
    return {"latent": latent, "head_dim": latent.nope_dim + latent.rope_dim, "experts": experts}


def refuse(raw: dict[str, Any]) -> dict[str, bool]:
    groups, top_groups, top_k = raw.get("n_group") or 1, raw.get("topk_group") or 1, raw.get("num_experts_per_tok", 0)
    scoring, method = raw.get("scoring_func", "sigmoid"), raw.get("topk_method", "noaux_tc")
    rope, is_yarn = rope_settings(raw), rope_type(raw) == "yarn"
    factor, one, all_dims = (rope.get(k) for k in ("attention_factor", "mscale", "mscale_all_dim"))
    return {
        **plain_attention(raw, ("default", "yarn")),
        "rope_interleave=false": not raw.get("rope_interleave", True),
        "norm_topk_prob=false": not raw.get("norm_topk_prob", True),
        f"scoring_func {scoring!r} (supported: sigmoid)": scoring != "sigmoid",
        f"topk_method {method!r} (supported: noaux_tc)": method != "noaux_tc",
        # cos and sin are then multiplied by a factor that is not 1
        f"attention_factor={factor}": factor is not None,
        f"yarn with mscale={one}, mscale_all_dim={all_dims} (supported: equal ones)": is_yarn and (not one or one != all_dims),
        # transformers ranks groups by their two best experts, Megatron by their top_k / topk_group best
        f"topk_group={top_groups} with num_experts_per_tok={top_k} (supported: half of it)": groups > 1 and top_k != 2 * top_groups,
        "moe_layer_freq other than 1": raw.get("moe_layer_freq", 1) != 1,
    }


FAMILY = Family(models="DeepSeek-V3, Moonlight-16B-A3B", read=read, refuse=refuse, names=Names(shared="mlp.shared_experts."))
