"""From losses per token to one number: weights that make the sum over all packs and ranks the wanted mean."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

Aggregation = Literal["token", "sequence", "sequence_sum"]


def token_weights(response_lengths: Tensor, aggregation: Aggregation, total_tokens: int, total_seqs: int) -> Tensor:
    """The weight of each response token of a pack, [R], R = sum of response_lengths [n] (int64).

    total_tokens, total_seqs: response tokens and sequences of the whole mini-batch, over all ranks and micro-batches. The sum of
    weight * loss over all of these is then
      token:     the mean over all tokens, weight 1 / total_tokens (DAPO, arXiv:2503.14476, equation 12)
      sequence:  the mean over sequences of each one's token mean, weight 1 / (length * total_seqs) (GRPO, arXiv:2402.03300, eq. 3)
      sequence_sum:  the mean over sequences of each one's sum, weight 1 / total_seqs; the constant length that Dr. GRPO
                 (arXiv:2503.20783, section 3.2) divides by as well is taken out by losses.objective
    whatever the split, because no weight depends on what else lies in the pack.
    """
    assert total_tokens > 0 and total_seqs > 0, (total_tokens, total_seqs)
    if aggregation == "token":
        per_seq = torch.full(response_lengths.shape, 1.0 / total_tokens, device=response_lengths.device)
    elif aggregation == "sequence_sum":
        per_seq = torch.full(response_lengths.shape, 1.0 / total_seqs, device=response_lengths.device)
    else:
        assert aggregation == "sequence", aggregation
        per_seq = (1.0 / (response_lengths.double() * total_seqs)).float()  # an empty response is repeated 0 times: its inf is never read
    return per_seq.repeat_interleave(response_lengths)
