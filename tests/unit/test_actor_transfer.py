"""Many tensors in one copy: joined bytes come apart as what they were. And metrics: summed on the device, in float64."""

from __future__ import annotations

import torch

from megaflow.actor.transfer import joined, parted, to_device, to_host
from megaflow.actor.update import sum_of_metrics

TENSORS = [torch.arange(7), torch.tensor([True, False, True]), torch.zeros(0), torch.randn(3, 5).bfloat16(), torch.randn(2)]


def test_joined_tensors_come_apart():
    whole, places = joined(TENSORS)
    assert places == [0, 64, 80, 80, 112], "each begins at a multiple of 16 bytes: 7 * 8 = 56, 3, 0, 15 * 2 = 30"
    for found, expected in zip(parted(whole, TENSORS, places), TENSORS, strict=True):
        assert found.dtype == expected.dtype and torch.equal(found, expected)


def test_on_a_cpu_nothing_is_copied():
    assert all(a is b for a, b in zip(to_device(TENSORS, torch.device("cpu")), TENSORS, strict=True))
    assert all(a is b for a, b in zip(to_host(TENSORS), TENSORS, strict=True)) and to_host([]) == []


def test_metrics_are_summed_in_float64():
    tiny = torch.tensor(2.0**-30)
    found = sum_of_metrics([{"a": torch.tensor(1.0), "b": tiny}, {"a": tiny, "b": tiny}])
    assert found == {"a": 1.0 + 2.0**-30, "b": 2.0**-29}
