"""Runs in SGLang's scheduler processes (`custom_weight_loader`): weights from the trainer straight into the parameters.

Either this worker reads them from the trainer ranks' windows (engine_pull.py), or they come in buckets.
"""

from __future__ import annotations

import json
from typing import Any

import torch

from megaflow.parallel.channel import ChannelEnd
from megaflow.parallel.digest import digest
from megaflow.rollout import latent_attention
from megaflow.rollout.engine_pull import Puller

_ends: dict[str, ChannelEnd] = {}  # descriptor -> the opened channel: mappings and IPC handles are kept between syncs
_pullers: dict[str, Puller] = {}
_parameters: dict[int, dict[str, torch.Tensor]] = {}


@torch.no_grad()
def load(model: torch.nn.Module, named_tensors: list[tuple[str, torch.Tensor]]) -> None:
    """named_tensors: one pair whose name is the message (JSON), `pull` or `buckets`: where to look, for each tp rank, and what to do."""
    message = json.loads(named_tensors[0][0])
    if "pull" in message:
        _pull(_parameters_of(model), **message["pull"])
    else:
        _receive(model, message)
    latent_attention.refresh(model, message.get("pull", message)["proof"])


def forget() -> None:
    """At the end of the process: give back what was opened of the trainer's memory, or the trainer's CUDA complains when it ends."""
    _ends.clear()
    _pullers.clear()


def _pull(parameters: dict[str, torch.Tensor], boards: list[dict[str, Any]], **what: Any) -> None:
    notice = boards[_tp_rank()]
    key = json.dumps(notice)
    if key not in _pullers:
        _pullers[key] = Puller(notice)
    _pullers[key].load(parameters, **what)


def _receive(model: torch.nn.Module, message: dict[str, Any]) -> None:
    end = _open(message["channels"][_tp_rank()])  # an error here reaches the trainer as the answer to the request
    try:
        _copy(_parameters_of(model), end, message)
    except Exception as e:  # the trainer waits on the channel, not on SGLang's answer
        end.fail(f"{type(e).__name__}: {e}")
        raise


def _copy(parameters: dict[str, torch.Tensor], end: ChannelEnd, message: dict[str, Any]) -> None:
    digests: list[torch.Tensor] = []
    of_worker = message["buckets"]
    buckets = of_worker[_tp_rank() % len(of_worker)]  # one list for all workers, or one for each
    end.begin()
    for number, entries in enumerate(buckets):
        data = end.receive()
        targets, sources = [], []
        for name, whole, first, offset, nbytes, dtype in entries:
            source = data[offset : offset + nbytes].view(getattr(torch, dtype))
            targets.append(_target(parameters, name, whole, source.dtype).view(-1)[first : first + len(source)])
            sources.append(source)
        if targets:  # a bucket of other workers' experts brings nothing
            torch._foreach_copy_(targets, sources)
        if message["flip"] == number and targets:
            targets[0][0] += 1  # fault injection: tests show that the proof catches and names it
        if message["proof"]:
            digests += [digest(t) for t in targets]
        if number == len(buckets) - 1 and digests:
            end.report_digests(torch.stack(digests))
        end.acknowledge()


def _target(parameters: dict[str, torch.Tensor], name: str, shape: list[int], dtype: torch.dtype) -> torch.Tensor:
    if name not in parameters:
        raise KeyError(f"the engine has no parameter {name}; it has e.g. {', '.join(list(parameters)[:3])}")
    target = parameters[name]
    if list(target.shape) != shape or target.dtype != dtype:
        raise ValueError(f"{name}: the engine stores {list(target.shape)} {target.dtype}, the trainer sends {shape} {dtype}")
    return target


def _parameters_of(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return _parameters.setdefault(id(model), {n: p.data for n, p in model.named_parameters()})


def _open(descriptor: dict[str, Any]) -> ChannelEnd:
    key = json.dumps(descriptor)
    if key not in _ends:
        _ends[key] = ChannelEnd(descriptor)
    return _ends[key]


def _tp_rank() -> int:
    from sglang.srt.distributed import get_tensor_model_parallel_rank

    return get_tensor_model_parallel_rank()
