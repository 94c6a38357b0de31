"""tools/bench/recipes.py: who runs where, and what the table says. The runs themselves take minutes each."""

from __future__ import annotations

import os

import pytest

from megaflow.config.loading import load
from tools.bench import recipes


def test_runs_at_once_share_the_cores(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1, 2, 3, 4, 5, 6, 7})
    assert recipes.core_sets(1) == [[0, 1, 2, 3, 4, 5, 6, 7]]
    assert recipes.core_sets(3) == [[0, 1], [2, 3], [4, 5]]
    assert recipes.core_sets(16) == [[i % 8] for i in range(16)]


def test_no_gpu_is_seen():
    assert recipes.environment()["CUDA_VISIBLE_DEVICES"] == ""


def test_what_is_overridden_exists():
    for name, overrides in recipes.OVERRIDES.items():
        load(str(recipes.ROOT / f"yaml/recipes/{name}.yaml"), overrides)


def test_the_table():
    good = {"recipe": "grpo", "seconds": 61.4, "reward_first": 0.4567, "reward_last": 0.861}
    good |= {"accuracy_before": 0.844, "accuracy_after": 0.953}
    text = recipes.table([good, {"recipe": "gspo", "seconds": 3.0, "error": "ended with 1: see gspo.log"}])
    assert text.splitlines()[2:] == [
        "| `grpo` | 0.457 | 0.861 | 0.844 | 0.953 | 61 |",
        "| `gspo` | ended with 1: see gspo.log | | | | 3 |",
    ]


def test_an_unknown_recipe_is_refused(monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["recipes.py", "grpoo"])
    with pytest.raises(SystemExit):
        recipes.parse()
    assert "no recipe grpoo; there are cispo, clip_cov" in capsys.readouterr().err
