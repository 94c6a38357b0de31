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
    return fields | {"prompt": sample.prompt.id, "response": _encode(sample.response), "rollout_logp": _encode(sample.rollout_logp)}


def from_json(saved: dict[str, Any], data: PromptStream) -> Sample:
    fields = {name: saved[name] for name in PLAIN}
    response, logp = _decode(saved["response"], np.int64), _decode(saved["rollout_logp"], np.float32)
    return Sample(data.prompt(saved["prompt"]), response=response, rollout_logp=logp, **fields)


def _encode(tensor: Tensor) -> str:
    return base64.b64encode(tensor.contiguous().numpy().tobytes()).decode()


def _decode(text: str, dtype: type) -> Tensor:
    return torch.from_numpy(np.frombuffer(base64.b64decode(text), dtype=dtype).copy())
