"""The experts that an engine's routers chose, in few bytes; and what must be mended in SGLang's recording of them (sglang 0.5.15)."""

from __future__ import annotations

import base64
from typing import Any

import numpy as np

from megaflow.shape import Experts


def route_dtype(num_experts: int) -> type[np.generic]:
    """The smallest integers that number the experts and that torch can index and compare."""
    return np.uint8 if num_experts <= 256 else np.int16


def compact(chosen: np.ndarray, experts: Experts, num_tokens: int) -> np.ndarray:
    """chosen [num_tokens - 1, L, K] of any integer type -> [num_tokens - 1, L_moe, K] uint8 or int16: the layers that have experts.

    The last token of a sequence was generated and never fed, so it has no route. Raises ValueError when the rows are not those of a
    sequence of num_tokens, or no routes of `experts`: a router that was not recorded leaves one number K times. (Only the first two are
    compared: this is done between an engine's answers, for millions of numbers.)
    """
    wanted = (max(num_tokens - 1, 0), len(experts.layers), experts.top_k)
    if chosen.shape != wanted:
        raise ValueError(f"routes of {list(chosen.shape)} (tokens, layers, experts), and {num_tokens} tokens have {list(wanted)}")
    routes = chosen[:, np.flatnonzero(experts.layers)]
    if routes.size and (routes.min() < 0 or routes.max() >= experts.count or (routes[..., :1] == routes[..., 1:2]).any()):
        raise ValueError(f"a route that names an expert twice, or none of the {experts.count}: the engine did not record its routers")
    return np.ascontiguousarray(routes.astype(route_dtype(experts.count)))


def unpacked(meta: dict[str, Any], experts: Experts, num_tokens: int) -> np.ndarray:
    """Of the `meta_info` of one of SGLang's answers, as `compact` returns it. It records every decoder layer."""
    found = meta.get("routed_experts")
    if found is None:
        raise ValueError("an answer came without its routes")
    flat = np.frombuffer(base64.b64decode(found), np.int16)
    return compact(flat.reshape(-1, len(experts.layers), experts.top_k), experts, num_tokens)


def own_copy(slice_of_buffer: Any, *_: Any) -> Any:
    """An AFTER hook of the recorder's `_get_local_slice`: the copy to the host runs on a stream of its own beside the next forward, which
    writes into the same device buffer; a copy made here, in the order of the forwards, is nobody else's."""
    return slice_of_buffer.clone()


def in_int16(routes: Any, *_: Any, **__: Any) -> Any:
    """An AFTER hook of the recorder's `get_topk`: half the bytes of a finished request on their way through SGLang's processes."""
    import torch

    return routes.to(torch.int16)


def number_routers(runner: Any) -> None:
    """A BEFORE hook of ModelRunner.init_routed_experts_capturer: Mixtral's routers do not know their layer, and their choices would be
    recorded nowhere, or, where a batch has as many tokens as there are layers, in a wrong place."""
    from sglang.srt.layers.moe.topk import TopK

    for name, module in runner.model.named_modules():
        if isinstance(module, TopK) and module.layer_id is None:
            module.layer_id = int(name.partition(".layers.")[2].split(".")[0])


def unpinned_host_cache(self: Any, num_tokens: int, num_layers: int, topk_size: int, name: str) -> None:
    """In place of BaseHostCache.__init__, which pins its memory and so needs a GPU's driver."""
    import torch

    self.buffer = torch.zeros((num_tokens, num_layers, topk_size), dtype=torch.int32)
    self.num_tokens, self.num_layers, self.topk_size, self.name = num_tokens, num_layers, topk_size, name
