"""The head of a reward model in SGLang's scheduler processes. Hooked by sglang_plugin.py; needed for sglang 0.5.15."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor


def without_random_bias(original: Any, model: torch.nn.Module, weights: Iterable[tuple[str, Tensor]], target_device: Any) -> Any:
    """An AROUND hook of `DefaultModelLoader.load_weights_and_postprocess`: a bias that the folder does not have is 0.

    SGLang gives Qwen's sequence classification a head with a bias, which transformers' has not: it stayed as torch drew it, and every
    score was off by that number.
    """
    loaded: set[str] = set()

    def noted() -> Iterator[tuple[str, Tensor]]:
        for name, tensor in weights:
            loaded.add(name)
            yield name, tensor

    result = original(model, noted(), target_device)
    bias = getattr(getattr(model, "score", None), "bias", None)
    if bias is not None and "score.bias" not in loaded:
        bias.data.zero_()
    return result
