"""From samples to one packed forward: sequences one after another, without padding."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from torch import Tensor

from megaflow.types import Sample


@dataclass
class Packed(PackedSeqParams):
    """What our attention and rotary modules need of a pack; travels through Megatron's layers as `packed_seq_params`.

    Not Megatron's own `thd` format: that one cuts q and k per sequence on the host in each layer. Here positions come as a tensor,
    rotary frequencies are looked up once per pack, and only the attention itself sees the borders.
    """

    qkv_format: str = "packed"
    positions: Tensor | None = None  # [T] int64, within each sequence
    lengths: list[int] = field(default_factory=list)  # of the sequences; on the host, so that nobody must ask the device

    @classmethod
    def of(cls, lengths: list[int], device: torch.device) -> Packed:
        bounds = torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)
        positions = torch.cat([torch.arange(n) for n in lengths])
        bounds, positions = (t.to(device, non_blocking=True) for t in (bounds, positions))
        longest = max(lengths)
        borders = {"cu_seqlens_q": bounds, "cu_seqlens_kv": bounds, "max_seqlen_q": longest, "max_seqlen_kv": longest}
        return cls(**borders, positions=positions, lengths=lengths)


@dataclass
class MicroBatch:
    """One packed forward.

    rows     [R] int64: positions in the pack whose output predicts a response token
    targets  [R] int64: those tokens
    """

    samples: list[Sample]
    tokens: Tensor  # [1, T] int64
    packed: Packed
    rows: Tensor
    targets: Tensor
    response_lengths: list[int]

    @property
    def num_tokens(self) -> int:
        return self.tokens.shape[1]


def make_micro_batch(samples: list[Sample], device: torch.device, multiple: int = 1) -> MicroBatch:
    """Pack samples. `multiple`: T is filled up to it with one sequence of padding (sequence parallelism cuts T into equal parts).

    With no samples: one token that predicts nothing, so that a rank without work still joins the others' collectives.
    """
    tokens, rows, lengths, start = [], [], [], 0
    for s in samples:
        prompt = torch.tensor(s.prompt.tokens, dtype=torch.int64)
        tokens += [prompt, s.response]
        rows.append(start + len(prompt) - 1 + torch.arange(len(s.response)))
        lengths.append(s.num_tokens)
        start += s.num_tokens
    fill = -start % multiple if samples else multiple
    if fill:
        tokens.append(torch.zeros(fill, dtype=torch.int64))
        lengths.append(fill)
    empty = torch.zeros(0, dtype=torch.int64)
    return MicroBatch(
        samples=samples,
        tokens=torch.cat(tokens)[None].to(device, non_blocking=True),
        packed=Packed.of(lengths, device),
        rows=torch.cat([empty, *rows]).to(device, non_blocking=True),
        targets=torch.cat([empty, *(s.response for s in samples)]).to(device, non_blocking=True),
        response_lengths=[s.num_response for s in samples],
    )
