"""A sample that waits for the next step, as JSON values: part of a checkpoint. Bit for bit the same when read back."""

from __future__ import annotations

import base64
from typing import Any

import numpy as np
import torch
from torch import Tensor

from megaflow.data import PromptStream
from megaflow.types import Sample

PLAIN = ("group", "index", "finish", "version", "text", "reward", "reward_parts", "baseline")


def to_json(sample: Sample) -> dict[str, Any]:
    """The prompt by its id only; it is in the data."""
    assert sample.response is not None and sample.rollout_logp is not None, "a sample is kept with its tokens"
    fields = {name: getattr(sample, name) for name in PLAIN}
    tensors = {"response": _encode(sample.response), "rollout_logp": _encode(sample.rollout_logp)}
    if sample.routes is not None:
        kind = str(sample.routes.dtype).removeprefix("torch.")
        tensors["routes"] = {"dtype": kind, "shape": list(sample.routes.shape), "data": _encode(sample.routes)}
    return fields | {"prompt": sample.prompt.id} | tensors


def from_json(saved: dict[str, Any], data: PromptStream) -> Sample:
    fields = {name: saved[name] for name in PLAIN}
    response, logp = _decode(saved["response"], np.int64), _decode(saved["rollout_logp"], np.float32)
    routes = None
    if "routes" in saved:
        routes = _decode(saved["routes"]["data"], np.dtype(saved["routes"]["dtype"])).view(saved["routes"]["shape"])
    return Sample(data.prompt(saved["prompt"]), response=response, rollout_logp=logp, routes=routes, **fields)


def _encode(tensor: Tensor) -> str:
    return base64.b64encode(tensor.contiguous().numpy().tobytes()).decode()


def _decode(text: str, dtype: type | np.dtype) -> Tensor:
    return torch.from_numpy(np.frombuffer(base64.b64decode(text), dtype=dtype).copy())
