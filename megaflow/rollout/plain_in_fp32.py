"""SGLang's CUDA kernels of norms, activations and rotary embeddings take 16 bits and nothing else: "failed to dispatch data type Float"
(sglang 0.5.15). A model in fp32 takes the plain torch form that each of these layers has beside its kernel."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


def dispatch_forward(original: Callable[[Any], Callable], op: Any) -> Callable:
    """Around MultiPlatformOp's: which of its forward methods a layer gets. While a model is built, torch's default is its dtype."""
    if torch.get_default_dtype() == torch.float32 and isinstance(op, _kinds()):
        return op.forward_native
    return original(op)


def _kinds() -> tuple[type, ...]:
    from sglang.srt.layers.activation import GeluAndMul, SiluAndMul
    from sglang.srt.layers.layernorm import GemmaRMSNorm, RMSNorm
    from sglang.srt.layers.rotary_embedding.base import RotaryEmbedding

    return RMSNorm, GemmaRMSNorm, SiluAndMul, GeluAndMul, RotaryEmbedding
