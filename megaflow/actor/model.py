"""Build the Megatron-core model of a ModelShape: GPTModel with the local layer spec and our modules, behind one factory.

GPTModel, though megatron-core 0.19 calls it deprecated: its successor, HybridModel, cannot be built without Transformer Engine.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from megatron.core.transformer.module import Float16Module
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig
from torch import Tensor

from megaflow.actor.chunks import Chunks
from megaflow.actor.gradients import add_product
from megaflow.actor.latent import LatentRotary, latent_settings
from megaflow.actor.layers import block_spec
from megaflow.actor.mixture import keep_expert_bias_exact, moe_settings
from megaflow.actor.modules import PackedRotary
from megaflow.actor.scalar_head import ScalarHead
from megaflow.config.schema import Config
from megaflow.parallel import megatron_shim
from megaflow.parallel.device import on_cuda
from megaflow.parallel.mesh import Mesh
from megaflow.shape import ModelShape


def transformer_config(shape: ModelShape, config: Config) -> TransformerConfig:
    """Megatron's configuration of a decoder."""
    dtype = getattr(torch, config.model.dtype)
    parallel = config.parallel
    recompute = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
    make = TransformerConfig if shape.latent is None else MLATransformerConfig
    return make(
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
        use_te_activation_func=True,  # the MLP's activation as a module: our SwiGLU
        add_bias_linear=False,
        add_qkv_bias=shape.qkv_bias,
        qk_layernorm=shape.qk_norm or shape.latent is not None,
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
        context_parallel_size=parallel.cp,
        variable_seq_lengths=True,  # packs differ in length; pipeline stages tell each other
        calculate_per_token_loss=True,  # the loss comes already divided by the global count
        moe_token_dispatcher_type="alltoall",  # the default refuses variable lengths, also for a dense model
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
        masked_softmax_fusion=False,
        gradient_accumulation_fusion=config.model.kernels != "plain",
        persist_layer_norm=False,
        apply_rope_fusion=False,
        **(recompute if config.actor.recompute == "full" else {}),
        **_virtual_stages(parallel.vpp),
        **moe_settings(shape, parallel),
        **({} if shape.latent is None else latent_settings(shape)),
    )


def _virtual_stages(vpp: int) -> dict[str, Any]:
    """megatron-core 0.19.2 gives wrong results, without an error, where two stages interleave chunks by batched transfers."""
    return {"virtual_pipeline_model_parallel_size": vpp, "overlap_p2p_comm": True, "batch_p2p_comm": False} if vpp > 1 else {}


def build_model(shape: ModelShape, config: Config, mesh: Mesh, device: torch.device, head: str = "vocabulary") -> Chunks:
    """This rank's part, uninitialised: GPTModels, wrapped for 16-bit parameters where asked.

    head: vocabulary (logits), or scalar (one number a token: a critic or a reward model).
    """
    megatron_shim.offer_weight_gradient(add_product)
    cfg = transformer_config(shape, config)
    model_parallel_cuda_manual_seed(config.run.seed)  # sequence parallelism and recomputation ask for its states, even without dropout
    rotary_type, dim = (PackedRotary, shape.head_dim) if shape.latent is None else (LatentRotary, shape.latent.rope_dim)
    positions = shape.max_positions + 2 * mesh.cp.size + 1  # a critic's token after the last, and context parallelism's padding
    rotary = rotary_type(dim, shape.rope_theta, positions, device, shape.rope_scaling)
    vpp = config.parallel.vpp
    chunks = Chunks(_chunk(shape, cfg, config, mesh, rotary, head, i if vpp > 1 else None).to(device) for i in range(vpp))
    if cfg.bf16:
        chunks = chunks.map(lambda chunk: Float16Module(cfg, chunk))
    for chunk in chunks:
        keep_expert_bias_exact(chunk)
    return chunks


def _chunk(
    shape: ModelShape, cfg: TransformerConfig, config: Config, mesh: Mesh, rotary: PackedRotary, head: str, number: int | None
) -> GPTModel:
    """Virtual chunk `number` of this stage; None: the whole stage."""
    is_first = mesh.pp.is_first and number in (None, 0)
    is_last = mesh.pp.is_last and number in (None, config.parallel.vpp - 1)
    model = GPTModel(
        cfg,
        block_spec(shape, cfg, rotary, config.model, number),
        vocab_size=shape.padded_vocab(mesh.tp.size),
        max_sequence_length=shape.max_positions,
        pre_process=is_first,
        post_process=is_last,
        share_embeddings_and_output_weights=shape.tied and head == "vocabulary",
        position_embedding_type="rope",
        rotary_base=shape.rope_theta,
        parallel_output=True,
        vp_stage=number,
    )
    if head == "scalar" and is_last:
        model.output_layer = ScalarHead(cfg)
    model.rotary_pos_emb = rotary
    return model


def global_parameters(chunks: Chunks) -> dict[str, Tensor]:
    """This rank's parameters, and the experts' bias, by global name: layers and experts are numbered over all ranks.

    A tied embedding's copy on the last stage comes as `output_layer.weight`.
    """
    return {name: p for gpt in chunks.unwrapped() for name, p in _of_chunk(gpt)}


def _of_chunk(gpt: GPTModel) -> Iterator[tuple[str, Tensor]]:
    numbers = [layer.layer_number - 1 for layer in gpt.decoder.layers]
    first_expert = next((m.local_expert_indices[0] for m in gpt.modules() if isinstance(m, MoELayer)), 0)

    def global_name(name: str) -> str:
        name = re.sub(r"^decoder\.layers\.(\d+)\.", lambda m: f"decoder.layers.{numbers[int(m[1])]}.", name)
        return re.sub(r"\.local_experts\.(\d+)\.", lambda m: f".local_experts.{int(m[1]) + first_expert}.", name)

    for name, p in gpt.named_parameters():
        yield global_name(name), p
    for name, buffer in gpt.named_buffers():
        if name.endswith(".expert_bias"):
            yield global_name(name), buffer
