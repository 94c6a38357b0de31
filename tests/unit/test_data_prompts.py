"""Tokens back into text."""

from __future__ import annotations

import random
from types import SimpleNamespace

import torch

from megaflow.data import decoded
from tools.make_tiny_model import make_tokenizer


def test_rows_at_once_are_the_rows_one_by_one():
    """Special tokens, bytes that are no text by themselves, nothing at all."""
    tokenizer, draw = make_tokenizer(307), random.Random(0)
    rows = [torch.tensor([draw.randrange(len(tokenizer)) for _ in range(length)], dtype=torch.int64) for length in (50, 1, 7, 0)]
    expected = [tokenizer.decode(row.tolist(), skip_special_tokens=True) for row in rows]
    assert decoded(tokenizer, rows) == expected and "�" in expected[0]


def test_a_tokenizer_that_cleans_its_text_up_does_so():
    def decode(tokens: list[int], skip_special_tokens: bool) -> str:
        assert skip_special_tokens
        return " ".join(map(str, tokens))

    tokenizer = SimpleNamespace(backend_tokenizer=None, clean_up_tokenization_spaces=True, decode=decode)
    assert decoded(tokenizer, [torch.tensor([1, 2]), torch.tensor([3])]) == ["1 2", "3"]
