"""Buckets of a sync between layouts of experts, expert tensor parallelism, virtual stages and latent attention, on four gloo ranks."""

from __future__ import annotations

from tests.ranks import run_ranks


def test_every_worker_gets_the_bits_that_it_stores():
    reports = run_ranks("buckets", 4, timeout=200)
    for rank in reports:
        for name, case in rank.items():
            assert not case["wrong"], (name, case)
            if case["expected"] == "direct but dense":  # the experts lie where they are wanted; attention is cut by another tp
                assert case["ways"] == {"tp": False, "etp": True}, (name, case)
            else:
                assert case["mode"] == case["expected"], (name, case)
    many = [case for case in reports[0].values() if case["buckets"] > 4]
    assert len(many) == len(reports[0]), "small buckets: borders lie within layers"
