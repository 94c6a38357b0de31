"""Sums and means over the tokens of each sequence of a pack. R tokens of n sequences in a row."""

from __future__ import annotations

import torch
from torch import Tensor


def sums(values: Tensor, seq_index: Tensor, num_seqs: int) -> Tensor:
    """values [R], seq_index [R] int64 -> [n] float64: a sequence of thousands of tokens adds up many small differences."""
    return values.new_zeros(num_seqs).double().index_add_(0, seq_index, values.double())


def means(values: Tensor, seq_index: Tensor, num_seqs: int) -> Tensor:
    """As sums, divided by the number of tokens; 0 for a sequence without any."""
    counts = values.new_zeros(num_seqs).index_add_(0, seq_index, torch.ones_like(values))  # bincount would wait for the device
    return sums(values, seq_index, num_seqs) / counts.clamp(min=1)
