"""One number for each token instead of logits: the head of a critic and of a reward model."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from torch import Tensor


class ScalarHead(torch.nn.Module):
    """x -> weight x + bias, in fp32 whatever the model's dtype. Every tensor-parallel rank holds all of it.

    Under sequence parallelism each rank sees its part of the tokens, so the attribute asks Megatron to sum the gradients over tp;
    the results are gathered, and since every rank then computes the same loss, their gradient is cut and not summed.
    """

    def __init__(self, config):
        super().__init__()
        self.sequence_parallel = config.sequence_parallel
        place = {"dtype": config.params_dtype, "device": torch.cuda.current_device()}
        self.weight = torch.nn.Parameter(torch.zeros(1, config.hidden_size, **place))
        self.bias = torch.nn.Parameter(torch.zeros(1, **place))
        for p in (self.weight, self.bias):
            p.sequence_parallel = config.sequence_parallel

    def forward(self, hidden_states: Tensor) -> Tensor:
        """hidden [T, 1, H] (megatron; T/tp under sequence parallelism) -> [T] fp32."""
        values = F.linear(hidden_states.float(), self.weight.float(), self.bias.float())  # [T, 1, 1]
        if self.sequence_parallel:
            values = gather_from_sequence_parallel_region(values, tensor_parallel_output_grad=False)
        return values[:, 0, 0]
