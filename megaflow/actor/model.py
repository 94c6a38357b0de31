"""Build the Megatron-core model of a ModelShape: GPTModel with the local layer spec and our modules, behind one factory.

GPTModel, though megatron-core 0.19 calls it deprecated: its successor, HybridModel, cannot be built without Transformer Engine.
"""

from __future__ import annotations

import functools
import re

import torch
import torch.nn.functional as F
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from megatron.core.transformer.module import Float16Module
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from megaflow.actor.modules import PackedAttention, PackedRotary, RMSNorm
from megaflow.config.schema import Config
from megaflow.parallel.device import on_cuda
from megaflow.parallel.mesh import Mesh
from megaflow.shape import ModelShape


def transformer_config(shape: ModelShape, config: Config) -> TransformerConfig:
    """Megatron's configuration of a dense decoder."""
    dtype = getattr(torch, config.model.dtype)
    parallel = config.parallel
    recompute = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
    return TransformerConfig(
        num_layers=shape.num_layers,
        hidden_size=shape.hidden_size,
        ffn_hidden_size=shape.ffn_size,
        num_attention_heads=shape.num_heads,
        num_query_groups=shape.num_kv_heads,
        kv_channels=shape.head_dim,
        layernorm_epsilon=shape.norm_eps,
        normalization="RMSNorm",
        gated_linear_unit=True,
        activation_func=F.silu,
        add_bias_linear=False,
        add_qkv_bias=shape.qkv_bias,
        qk_layernorm=shape.qk_norm,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        bf16=dtype == torch.bfloat16,
        use_cpu_initialization=not on_cuda(),
        perform_initialization=False,  # every weight comes from the Hugging Face folder
        tensor_model_parallel_size=parallel.tp,
        pipeline_model_parallel_size=parallel.pp,
        sequence_parallel=parallel.sp,
        variable_seq_lengths=True,  # packs differ in length; pipeline stages tell each other
        calculate_per_token_loss=True,  # the loss comes already divided by the global count
        moe_token_dispatcher_type="alltoall",  # the default refuses variable lengths, also for a dense model
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
        masked_softmax_fusion=False,
        gradient_accumulation_fusion=False,
        persist_layer_norm=False,
        apply_rope_fusion=False,
        **(recompute if config.actor.recompute == "full" else {}),
    )


def build_model(shape: ModelShape, config: Config, mesh: Mesh, device: torch.device) -> torch.nn.Module:
    """This rank's stage, uninitialised: GPTModel, wrapped for 16-bit parameters where asked."""
    cfg = transformer_config(shape, config)
    model_parallel_cuda_manual_seed(config.run.seed)  # sequence parallelism and recomputation ask for its states, even without dropout
    layer = get_gpt_layer_local_spec(qk_layernorm=shape.qk_norm, normalization="RMSNorm")
    layer.submodules.input_layernorm = layer.submodules.pre_mlp_layernorm = RMSNorm
    attention = layer.submodules.self_attention.submodules
    attention.core_attention = functools.partial(PackedAttention, kernel=config.model.attention)
    if shape.qk_norm:
        attention.q_layernorm = attention.k_layernorm = RMSNorm
    block = TransformerBlockSubmodules(layer_specs=[layer] * get_num_layers_to_build(cfg), layer_norm=RMSNorm)
    model = GPTModel(
        cfg,
        block,
        vocab_size=shape.padded_vocab(mesh.tp.size),
        max_sequence_length=shape.max_positions,
        pre_process=mesh.pp.is_first,
        post_process=mesh.pp.is_last,
        share_embeddings_and_output_weights=shape.tied,
        position_embedding_type="rope",
        rotary_base=shape.rope_theta,
        parallel_output=True,
    )
    model.rotary_pos_emb = PackedRotary(shape.head_dim, shape.rope_theta, shape.max_positions, device, shape.rope_scaling)
    model.to(device)
    return Float16Module(cfg, model) if cfg.bf16 else model


def unwrap(model: torch.nn.Module) -> GPTModel:
    while hasattr(model, "module"):
        model = model.module
    return model


def global_parameters(model: torch.nn.Module) -> dict[str, Tensor]:
    """This stage's parameters by global name. A tied embedding's copy on the last stage comes as `output_layer.weight`."""
    gpt = unwrap(model)
    first_layer = gpt.decoder.layers[0].layer_number - 1 if len(gpt.decoder.layers) else 0

    def global_name(name: str) -> str:
        return re.sub(r"^decoder\.layers\.(\d+)\.", lambda m: f"decoder.layers.{int(m[1]) + first_layer}.", name)

    return {global_name(name): p for name, p in gpt.named_parameters()}
