"""Costs of sequences by hand, and that balance and packs follow them."""

from __future__ import annotations

import dataclasses

from megaflow.data.cost import SequenceCost, flops
from megaflow.data.packing import pack_micro_batches
from megaflow.shape import Experts, ModelShape

# 2 layers, hidden 8, ffn 20, 2 heads and 1 key/value head of 4, vocabulary 50
SHAPE = ModelShape("qwen2", 2, 8, 20, 2, 1, 4, 50, 64, 1e-6, 1e4, True, True, False)


def test_by_hand():
    # a layer: q 8*8, k and v 8*4 each, o 8*8; gate, up, down 8*20 each: 64 + 64 + 64 + 480 = 672 weights
    assert SequenceCost.of(SHAPE) == SequenceCost(linear=2 * 2 * 672, quadratic=2 * 2 * 8, head=2 * 50 * 8)
    # 3 tokens, 2 of them with logits: 3 * 2688 + 9 * 32 + 2 * 800
    assert flops(SHAPE, [3], [2]) == 8064 + 288 + 1600
    assert flops(SHAPE, [3, 1], [2, 0], with_head=False) == 8064 + 288 + 2688 + 32


def test_only_the_chosen_experts_count():
    # the second layer routes: 4 experts of 10, 2 chosen, and a shared one of 6: 192 + router 8*4 + 3*8*(2*10 + 6) = 848
    sparse = dataclasses.replace(SHAPE, experts=Experts(4, 2, 10, (False, True), shared_ffn_size=6))
    assert SequenceCost.of(sparse).linear == 2 * (672 + 848)


def test_attention_counts_when_sequences_go_to_ranks():
    # 10 L + L^2: 30 -> 1200, 20 -> 600, 10 -> 200 each. By tokens 30 | 20 + 10, then 10 to the first (ties: fewer items): 40 | 30
    cost = SequenceCost(linear=10, quadratic=1, head=0)
    assert cost.balanced([30, 20, 10, 10], 2) == [[0], [1, 2, 3]]  # 1200 | 600 + 200 + 200


def test_attention_counts_within_the_limit_of_tokens():
    lengths, cost = [30, 20, 10, 10], SequenceCost(10, 1, 0).of_length
    assert pack_micro_batches(lengths, 40, cost=cost) == [[0], [1, 2, 3]]
    # at 35 tokens [1, 2, 3] is too long: three packs, 30 | 20 | 10 + 10
    assert pack_micro_batches(lengths, 35, cost=cost) == [[0], [1], [2, 3]]
    assert pack_micro_batches(lengths, 1, cost=cost) == [[0], [1], [2], [3]]
