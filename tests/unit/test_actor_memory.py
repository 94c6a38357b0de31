"""Sleep and wake: bytes go to the host and come back, in place; and how much has to go, worked out by hand."""

from __future__ import annotations

import pytest
import torch

from megaflow.actor import memory
from megaflow.actor.memory import RESERVE_BYTES, Demand, Parking, by_address, choose_offload

GB = 10**9


def test_values_survive_bitwise_and_views_stay_what_they_are(monkeypatch):
    monkeypatch.setattr(memory, "BLOCK_BYTES", 1000)  # tensors begin and end within blocks, and one is longer than a block
    g = torch.Generator().manual_seed(0)
    whole = torch.randn(700, generator=g)
    tensors = [whole[:300].view(20, 15), whole[300:], torch.randn(33, generator=g).bfloat16(), torch.zeros(0), torch.arange(5)]
    expected = [t.clone() for t in tensors]
    parking, storages = Parking(), list(by_address(tensors).values())
    assert len(storages) == 3, "two views of one storage move once, and an empty tensor not at all"
    for _ in range(3):
        assert parking.park(storages) == 700 * 4 + 33 * 2 + 5 * 8
        assert not any(t.untyped_storage().nbytes() for t in tensors)
        parking.unpark()
        assert all(torch.equal(a, b) for a, b in zip(tensors, expected, strict=True))
    assert len(parking.blocks) == 3, "the host memory of the first time serves again"
    whole.add_(1)
    assert torch.equal(tensors[1], expected[1] + 1)


@pytest.mark.parametrize(
    ("engine", "chosen"),
    [
        (100 * GB, "none"),  # 141 - 100 - 6.4 of reserve leaves 34.6; 3 + 18 fit
        (120 * GB, "optimizer"),  # leaves 14.6: only the 3 of the parameters do
        (133 * GB, "all"),  # leaves 1.6
        (140 * GB, "all"),  # nothing fits; the most that can be done
    ],
)
def test_auto_takes_the_least_that_fits(engine, chosen, caplog):
    assert RESERVE_BYTES == 6 * 2**30
    demand = Demand(device=141 * GB, engine=engine, parameters=3 * GB, optimizer=18 * GB)
    with caplog.at_level("INFO"):
        assert choose_offload("auto", demand) == chosen
    assert chosen in caplog.text and "141.0 GB" in caplog.text and "18.0 GB" in caplog.text
    assert choose_offload("none", demand) == "none" and choose_offload("all", demand) == "all"
