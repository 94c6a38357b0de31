"""How ranks exchange host data: pickled, ragged, never padded. Every function here is collective over its gloo group."""

from __future__ import annotations

import copyreg
import io
import pickle
from collections import ChainMap
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from megaflow.types import MendableError, UserError


class RemoteError(RuntimeError):
    """An error that another rank met first; its message is that rank's."""


def on_rank0(group: dist.ProcessGroup, fn: Callable[..., Any], *args: Any) -> Any:
    """Collective. Run `fn(*args)` on rank 0, give its result to every rank; raise on every rank what it raised there."""
    if dist.get_rank(group) != 0:
        return _unwrap(broadcast(group, None))
    error = None
    try:
        outcome = (fn(*args), None)
    except Exception as e:  # every kind must reach the other ranks, or they wait for ever
        error, outcome = e, (None, portable(e, 0))
    try:
        broadcast(group, outcome)
    except (pickle.PicklingError, TypeError, AttributeError) as e:
        error = TypeError(f"the result of {getattr(fn, '__name__', fn)} cannot be sent to the other ranks: {e}")
        broadcast(group, (None, portable(error, 0)))
    if error is not None:
        raise error
    return outcome[0]


def portable(error: BaseException, rank: int) -> Exception:
    """An error of the user keeps its type (and so its exit code), and one that can be mended; any other one travels as text."""
    if isinstance(error, UserError | MendableError):
        return error
    return RemoteError(error_text(error, rank, world_size=2))


def error_text(error: BaseException, rank: int, world_size: int) -> str:
    """What an error is called in a message: with its rank (if there are others) and type, unless it is the user's or says so already."""
    if isinstance(error, UserError | RemoteError):
        return str(error)
    text = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
    return f"rank {rank}: {text}" if world_size > 1 else text


def _unwrap(outcome: tuple[Any, Exception | None]) -> Any:
    value, error = outcome
    if error is not None:
        raise error
    return value


def broadcast(group: dist.ProcessGroup, value: Any) -> Any:
    """Collective. Rank 0's picklable value, on every rank."""
    first = dist.get_global_rank(group, 0)
    is_source = dist.get_rank(group) == 0
    data = _to_bytes(value) if is_source else None
    size = torch.tensor([len(data) if is_source else 0])
    dist.broadcast(size, first, group=group)
    if not is_source:
        data = torch.empty(int(size), dtype=torch.uint8)
    dist.broadcast(data, first, group=group)
    return value if is_source else _from_bytes(data)


def all_gather(group: dist.ProcessGroup, value: Any) -> list[Any]:
    """Collective. Every rank's picklable value, by rank."""
    out = [None] * dist.get_world_size(group)
    dist.all_gather_object(out, value, group=group)
    return out


def all_ok(group: dist.ProcessGroup, error: BaseException | None) -> None:
    """Collective. Raises on every rank if any rank brings an error: its own where it happened, elsewhere that of the lowest such rank.

    A MendableError only if no rank brings another kind, so that either all ranks mend or all ranks end.
    """
    failed = torch.tensor([error is not None], dtype=torch.int32)
    dist.all_reduce(failed, dist.ReduceOp.MAX, group=group)  # objects travel, in several rounds, only when there is one
    if not int(failed):
        return
    errors = [e for e in all_gather(group, None if error is None else portable(error, dist.get_rank(group))) if e is not None]
    final = [e for e in errors if not isinstance(e, MendableError)]
    if error is not None and not (final and isinstance(error, MendableError)):
        raise error
    raise (final or errors)[0]


def exchange(group: dist.ProcessGroup, outgoing: Sequence[Any]) -> list[Any]:
    """Collective. `outgoing[r]` goes to rank r; returns what each rank sent here, by rank."""
    packed = [_to_bytes(v) for v in outgoing]
    send = [len(p) for p in packed]
    sizes = torch.empty(len(send), dtype=torch.int64)
    dist.all_to_all_single(sizes, torch.tensor(send), group=group)
    receive = sizes.tolist()
    data = torch.empty(sum(receive), dtype=torch.uint8)
    dist.all_to_all_single(data, torch.cat(packed), output_split_sizes=receive, input_split_sizes=send, group=group)
    return [_from_bytes(part) for part in data.split(receive)]


def scatter(group, samples: list, replicas: list[list[int]], assign: Callable[[list[int], int], list[list[int]]]) -> list:
    """Collective. See Mesh.scatter. A sample held by several ranks is sent by the lowest of them, and not to ranks that have it."""
    held = all_gather(group, [(s.mini_batch, s.group, s.index, s.num_tokens) for s in samples])
    rank = dist.get_rank(group)
    owners: dict[tuple, list[int]] = {}
    for r, keys in enumerate(held):
        for key in keys:
            owners.setdefault(key, []).append(r)
    mine = {(s.mini_batch, s.group, s.index, s.num_tokens): s for s in samples}
    outgoing: list[list] = [[] for _ in held]
    kept = []
    for key, replica in _destinations(sorted(owners), len(replicas), assign):
        if rank in replicas[replica] and rank in owners[key]:
            kept.append(mine[key])
        if rank == owners[key][0]:
            for target in replicas[replica]:
                if target not in owners[key]:
                    outgoing[target].append(mine[key])
    received = [s for part in exchange(group, outgoing) for s in part]
    return sorted(kept + received, key=lambda s: (s.mini_batch, s.group, s.index))


def _destinations(keys: list[tuple], num_replicas: int, assign):
    """(key, replica) for every key; balanced within each mini batch, since each is an optimizer step of its own."""
    by_mini_batch: dict[int, list[tuple]] = {}
    for key in keys:
        by_mini_batch.setdefault(key[0], []).append(key)
    for members in by_mini_batch.values():
        for replica, indices in enumerate(assign([k[3] for k in members], num_replicas)):
            for i in indices:
                yield members[i], replica


def gather(group: dist.ProcessGroup, samples: list) -> list:
    """Collective. On rank 0 all ranks' samples in (group, index) order; elsewhere empty."""
    outgoing = [samples if r == 0 else [] for r in range(dist.get_world_size(group))]
    received = [s for part in exchange(group, outgoing) for s in part]
    return sorted(received, key=lambda s: (s.group, s.index))


def _as_array(t: torch.Tensor) -> tuple:
    if t.device.type != "cpu" or t.requires_grad or t.dtype == torch.bfloat16:
        return t.__reduce_ex__(pickle.HIGHEST_PROTOCOL)
    return torch.from_numpy, (t.numpy(),)


class _Pickler(pickle.Pickler):
    """Tensors as arrays: torch's own way takes ten times as long (0.2 ms each, there and back), and sends all that a view is part of."""

    dispatch_table = ChainMap({torch.Tensor: _as_array}, copyreg.dispatch_table)


def _to_bytes(value: Any) -> torch.Tensor:
    file = io.BytesIO()
    _Pickler(file, pickle.HIGHEST_PROTOCOL).dump(value)
    return torch.frombuffer(file.getbuffer(), dtype=torch.uint8)


def _from_bytes(data: torch.Tensor) -> Any:
    return pickle.loads(data.numpy())
