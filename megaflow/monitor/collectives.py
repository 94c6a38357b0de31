"""What this rank's process groups are waiting for, from torch's flight recorder. It is on by itself (NCCL and gloo) and costs nothing more.

Sequence numbers count the collectives of a group; they are the same on all its ranks. Reading them takes 30 us, and no collective.
"""

from __future__ import annotations

import pickle
from pathlib import Path
from types import FrameType
from typing import Any

import torch.distributed as dist
from torch._C import _distributed_c10d as c10d

Counts = dict[str, list[int]]  # group -> [collectives begun, collectives done]


_names: dict[tuple[int, str], str] = {}  # (recorder, its own number of a group) -> group


def _dumps(entries: bool) -> list[dict[str, Any]]:
    """Of gloo's recorder and of NCCL's."""
    recorders = [c10d._dump_fr_trace] + ([c10d._dump_nccl_trace] if dist.is_nccl_available() else [])
    return [pickle.loads(dump(entries, False, False)) for dump in recorders]


def counts() -> Counts:
    """Of all groups of this rank that have been used."""
    dumps = enumerate(_dumps(entries=False))
    by_number = {(recorder, number): status for recorder, dump in dumps for number, status in dump.get("pg_status", {}).items()}
    if not by_number.keys() <= _names.keys():  # a group was used for the first time
        for recorder, dump in enumerate(_dumps(entries=True)):
            _names.update({(recorder, str(entry["pg_id"])): entry["process_group"][0] for entry in dump.get("entries", [])})
    return {
        _names[place]: [max(0, status["last_enqueued_collective"]), max(0, status["last_completed_collective"])]
        for place, status in by_number.items()
        if place in _names
    }


def groups() -> dict[str, tuple[list[int], str]]:
    """group -> (its ranks, what it is called)."""
    names = dist.distributed_c10d._world.pg_names
    return {name: (dist.get_process_group_ranks(group), _called(group.group_desc)) for group, name in names.items()}


def _called(description: str) -> str:
    return "" if description == "undefined" else description.removesuffix("_GROUP").lower()


def begun() -> list[dict[str, Any]]:
    """The collectives that are begun and not done, oldest first: group, op, seq (number in its group), size, ranks, called."""
    status, members, found = counts(), groups(), []
    if all(begun <= done for begun, done in status.values()):
        return []
    for dump in _dumps(entries=True):
        for entry in dump.get("entries", []):
            group, number = entry["process_group"][0], entry["collective_seq_id"]
            if not entry["retired"] and number > status.get(group, [0, 0])[1]:
                ranks, called = members.get(group, ([], ""))
                facts = {"group": group, "op": entry["profiling_name"], "seq": number, "size": (entry["input_sizes"] or [[]])[0]}
                found.append(facts | {"ranks": [] if entry["is_p2p"] else ranks, "called": called})  # of two ranks: op says which
    return found


def save(path: Path) -> bool:
    """Everything that the recorders hold, as torch's own analysers read it (`python -m torch.distributed.flight_recorder...`)."""
    is_used = [d for d in _dumps(entries=True) if d.get("entries")]
    if is_used:
        path.write_bytes(pickle.dumps(is_used[-1]))  # NCCL's, if there is one
    return bool(is_used)


def call_in(frame: FrameType | None) -> str:
    """The collective that this stack is inside of, and who called it; "" if it is in none. For what no recorder sees, e.g. recv."""
    inside = ""
    while frame is not None:
        name = frame.f_code.co_filename
        if name.endswith(("torch/distributed/distributed_c10d.py", "torch/distributed/c10d_logger.py")):
            inside = frame.f_code.co_name if frame.f_code.co_name != "wrapper" else inside
        elif "/torch/" not in name:
            return f"{inside} called at {name}:{frame.f_lineno} ({frame.f_code.co_name})" if inside else ""
        frame = frame.f_back
    return inside
