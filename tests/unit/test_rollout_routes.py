"""An engine's routes in few bytes, and what is refused."""

from __future__ import annotations

import base64

import numpy as np
import pytest

from megaflow.rollout.routes import compact, unpacked
from megaflow.shape import Experts

EXPERTS = Experts(count=8, top_k=2, ffn_size=4, layers=(False, True, True))
ROUTES = np.array([[[0, 0], [3, 7], [1, 0]], [[0, 0], [2, 5], [6, 4]]], np.int32)  # of two tokens that were fed, in three layers


def test_dense_layers_are_left_out_and_a_byte_is_enough():
    found = compact(ROUTES, EXPERTS, 3)
    assert found.dtype == np.uint8 and found.tolist() == [[[3, 7], [1, 0]], [[2, 5], [6, 4]]]


def test_more_experts_than_a_byte_can_number():
    many = Experts(count=300, top_k=2, ffn_size=4, layers=(True, True, True))
    found = compact(ROUTES + np.array([0, 250], np.int32), many, 3)
    assert found.dtype == np.int16 and found[1].tolist() == [[0, 250], [2, 255], [6, 254]]


def test_an_answer_of_sglang():
    text = base64.b64encode(ROUTES.astype(np.int16).tobytes()).decode()
    assert unpacked({"routed_experts": text}, EXPERTS, 3).tolist() == [[[3, 7], [1, 0]], [[2, 5], [6, 4]]]
    with pytest.raises(ValueError, match="came without its routes"):
        unpacked({}, EXPERTS, 3)


def test_a_single_token_was_never_fed():
    assert compact(np.zeros((0, 3, 2), np.int32), EXPERTS, 1).shape == (0, 2, 2)


@pytest.mark.parametrize(
    ("change", "num_tokens", "message"),
    [
        (lambda r: r, 4, r"routes of \[2, 3, 2\] \(tokens, layers, experts\), and 4 tokens have \[3, 3, 2\]"),
        (lambda r: np.where(r == 7, 8, r), 3, "none of the 8"),
        (lambda r: np.where(r == 7, 3, r), 3, "an expert twice"),
        (lambda r: r - 5 * (r == 4), 3, "none of the 8"),
        (np.zeros_like, 3, "did not record its routers"),
    ],
)
def test_what_cannot_be_a_route_is_refused(change, num_tokens, message):
    with pytest.raises(ValueError, match=message):
        compact(change(ROUTES), EXPERTS, num_tokens)
