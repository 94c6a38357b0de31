"""From samples to one packed forward: sequences one after another, without padding."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from torch import Tensor

from megaflow.actor.context import Context
from megaflow.actor.transfer import to_device
from megaflow.parallel.mesh import Axis
from megaflow.types import Sample


@dataclass
class Routes:
    """The experts that an engine's routers chose, for a rank's tokens (T of the pack, or its part of them) and its layers.

    chosen   [T, layers, K] uint8 or int16
    known    [T] bool; False: no route is known, as of padding and of a sequence's last token
    """

    chosen: Tensor
    known: Tensor


@dataclass
class Packed(PackedSeqParams):
    """What our attention and rotary modules need of a pack; travels through Megatron's layers as `packed_seq_params`.

    Not Megatron's own `thd` format: that one cuts q and k per sequence on the host in each layer. Here positions come as a tensor,
    rotary frequencies are looked up once per pack, and only the attention itself sees the borders.
    """

    qkv_format: str = "packed"
    positions: Tensor | None = None  # [T] int64, within each sequence
    lengths: list[int] = field(default_factory=list)  # of the sequences; on the host, so that nobody must ask the device
    routes: Routes | None = None  # what this rank's routers are to do, if that is known (actor/replay.py)
    context: Context | None = None  # with context parallelism: T counts this rank's tokens, and cu_seqlens are those of its pieces

    @classmethod
    def of(cls, lengths: list[int], device: torch.device, cp: Axis | None = None) -> Packed:
        """cp: the context-parallel axis, if it has several ranks; each length must then be a multiple of 2 cp."""
        context = None if cp is None else Context.of(lengths, cp, device)
        queries, keys = (lengths, lengths) if context is None else zip(*context.pieces, strict=True)
        host = [torch.cat([torch.arange(n) for n in lengths]), _borders(queries), _borders(keys)]
        positions, *borders = to_device(host, device)
        return cls(
            cu_seqlens_q=borders[0],
            cu_seqlens_kv=borders[1],
            max_seqlen_q=max(queries),
            max_seqlen_kv=max(keys),
            positions=positions if context is None else positions[context.mine],
            lengths=lengths,
            context=context,
        )


def _borders(lengths: Sequence[int]) -> Tensor:
    """Where attention's sequences begin, [S + 1] int32."""
    return torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)


@dataclass
class MicroBatch:
    """One packed forward.

    rows     [R] int64: positions in the pack whose output predicts a response token
    targets  [R] int64: those tokens
    With context parallelism tokens, rows and targets are this rank's; `slots` [R] int64 are its rows' places among all of the pack's.
    """

    samples: list[Sample]
    tokens: Tensor  # [1, T] int64
    packed: Packed
    rows: Tensor
    targets: Tensor
    response_lengths: list[int]
    slots: Tensor | None = None

    @property
    def num_tokens(self) -> int:
        return self.tokens.shape[1]


def make_micro_batch(samples: list[Sample], device: torch.device, multiple: int = 1, cp: Axis | None = None) -> MicroBatch:
    """Pack samples. `multiple`: a rank's T is filled up to it with one sequence of padding (sequence parallelism cuts T into equal parts).

    cp: the context-parallel axis, if it has several ranks: each sequence is padded to a multiple of 2 cp, and cut.
    With no samples: padding that predicts nothing, so that a rank without work still joins the others' collectives.
    """
    each, all_together = (1, multiple) if cp is None else (2 * cp.size, math.lcm(2 * cp.size, multiple * cp.size))
    tokens, rows, lengths, start = [], [], [], 0
    for s in samples:
        prompt = torch.tensor(s.prompt.tokens, dtype=torch.int64)
        padding = -s.num_tokens % each
        tokens += [prompt, s.response, torch.zeros(padding, dtype=torch.int64)]
        rows.append(start + len(prompt) - 1 + torch.arange(len(s.response)))
        lengths.append(s.num_tokens + padding)
        start += s.num_tokens + padding
    fill = -start % all_together if samples else all_together
    if fill:
        tokens.append(torch.zeros(fill, dtype=torch.int64))
        lengths.append(fill)
    empty = torch.zeros(0, dtype=torch.int64)
    packed = Packed.of(lengths, device, cp)
    whole = _Rows(torch.cat(tokens), torch.cat([empty, *rows]), torch.cat([empty, *(s.response for s in samples)]))
    mine, slots = (whole, None) if cp is None else whole.of_rank(packed.context.mine.cpu())
    on_device = to_device([mine.tokens[None], mine.rows, mine.targets, *([] if slots is None else [slots])], device)
    return MicroBatch(
        samples=samples,
        tokens=on_device[0],
        packed=packed,
        rows=on_device[1],
        targets=on_device[2],
        response_lengths=[s.num_response for s in samples],
        slots=None if slots is None else on_device[3],
    )


@dataclass
class _Rows:
    """Tokens [T] of a pack, and which of them predict what; on the host."""

    tokens: Tensor
    rows: Tensor
    targets: Tensor

    def of_rank(self, mine: Tensor) -> tuple[_Rows, Tensor]:
        """The part that lies on the rank whose tokens are `mine`, and which of the rows these are."""
        place = torch.full_like(self.tokens, -1)
        place[mine] = torch.arange(len(mine))
        slots = (place[self.rows] >= 0).nonzero()[:, 0]
        return _Rows(self.tokens[mine], place[self.rows[slots]], self.targets[slots]), slots
