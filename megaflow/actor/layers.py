"""The decoder layers of a ModelShape as Megatron-core's layer specs: local modules, with ours where only Transformer Engine has them."""

from __future__ import annotations

import functools
from collections.abc import Iterator

from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.mlp import MLPSubmodules
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.torch_norm import LayerNormBuilder
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import get_transformer_layer_offset

from megaflow.actor.experts import GroupedExperts, use_grouped
from megaflow.actor.fused import use_fused
from megaflow.actor.latent import LatentAttention, LatentPackedAttention
from megaflow.actor.modules import PackedAttention, PackedRotary, RMSNorm, SwiGLU
from megaflow.config.schema import ModelConfig
from megaflow.shape import ModelShape


def block_spec(
    shape: ModelShape, cfg: TransformerConfig, rotary: PackedRotary, settings: ModelConfig, chunk: int | None
) -> TransformerBlockSubmodules:
    """The layers of this stage, or of its virtual chunk. settings: which kernels."""
    norm = functools.partial(RMSNorm, fused=use_fused(settings.kernels))
    first, count = get_transformer_layer_offset(cfg, vp_stage=chunk), get_num_layers_to_build(cfg, vp_stage=chunk)
    kinds = {shape.is_sparse(first + i) for i in range(count)}
    specs = {sparse: _layer_spec(shape, cfg, sparse, rotary, settings, norm) for sparse in kinds}
    return TransformerBlockSubmodules(layer_specs=[specs[shape.is_sparse(first + i)] for i in range(count)], layer_norm=norm)


def _layer_spec(
    shape: ModelShape, cfg: TransformerConfig, sparse: bool, rotary: PackedRotary, settings: ModelConfig, norm: LayerNormBuilder
) -> ModuleSpec:
    """Experts: our grouped ones or SequentialMLP; megatron-core 0.19.2 has grouped ones with Transformer Engine only."""
    layer = get_gpt_layer_local_spec(
        num_experts=shape.experts.count if sparse else None,
        qk_layernorm=shape.qk_norm or shape.latent is not None,
        multi_latent_attention=shape.latent is not None,
        normalization="RMSNorm",
    )
    layer.submodules.input_layernorm = layer.submodules.pre_mlp_layernorm = norm
    if sparse and use_grouped(settings.experts, shape, cfg.expert_tensor_parallel_size, cfg.params_dtype):
        parts = layer.submodules.mlp.keywords["submodules"]
        parts.experts = functools.partial(GroupedExperts, **parts.experts.keywords)
    for mlp in _mlps(layer.submodules.mlp):
        mlp.activation_func = functools.partial(SwiGLU, fused=use_fused(settings.kernels))
    attention = layer.submodules.self_attention
    if shape.latent is not None:
        attention.module = LatentAttention
        attention.params = {**attention.params, "rotary": rotary}
        attention.submodules.q_layernorm = IdentityOp if shape.latent.q_rank is None else norm
        attention.submodules.kv_layernorm = norm
        attention.submodules.core_attention = ModuleSpec(module=LatentPackedAttention, params={"kernel": settings.attention})
        return layer
    fused = use_fused(settings.kernels)
    attention.submodules.core_attention = functools.partial(PackedAttention, kernel=settings.attention, rotary=rotary, fused=fused)
    if shape.qk_norm:
        attention.submodules.q_layernorm = attention.submodules.k_layernorm = norm
    return layer


def _mlps(builder: functools.partial) -> Iterator[MLPSubmodules]:
    """The parts of every MLP in a layer's builder: its own, or its experts' and shared experts'."""
    parts = builder.keywords["submodules"]
    if isinstance(parts, MLPSubmodules):
        yield parts
        return
    for inner in (parts.experts, parts.shared_experts):
        yield from _mlps(inner)
