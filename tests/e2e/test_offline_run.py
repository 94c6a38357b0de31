"""A run from stored pairs to online steps, traced; and a second process that goes on from its first checkpoint, bitwise."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from tests.e2e.program import metrics, write_config
from tests.ranks import run_ranks
from tools.make_tiny_model import make


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("made")
    make(folder / "model", data=folder / "data")
    lines = [json.loads(line) for line in (folder / "data" / "train.jsonl").read_text().splitlines()[:6]]
    pairs = [{"prompt": x["prompt"], "chosen": x["answer"], "rejected": "no idea"} for x in lines]
    (folder / "pairs.jsonl").write_text("".join(json.dumps(pair) + "\n" for pair in pairs))
    return folder


def config(made: Path, name: str, resume: str = "auto") -> str:
    return write_config(
        made / f"{name}.yaml", made, parallel={"tp": 1},
        run={"steps": 3, "save_every": 1, "keep_last": 3, "export_hf": True, "resume": resume},
        data={"rollouts": str(made / "pairs.jsonl")}, offline={"steps": 2, "objective": "dpo", "batch": 4}, profile={"steps": "2-3"},
    )  # fmt: skip


def test_dpo_then_online_in_one_run_or_from_a_checkpoint_between(made: Path) -> None:
    """4 pairs a step, one mini batch of 8 sequences; the second step goes on into the second epoch of 6, with 2 reference sums known."""
    straight, branch = made / "runs" / "straight", made / "runs" / "branch"
    configs = config(made, "straight"), config(made, "branch", str(straight / "checkpoints" / "step_000001"))
    (found,) = run_ranks("offline_then_online", 1, *configs, timeout=280)
    assert found["codes"] == [[0]] * 2
    first, second, online = metrics(straight)[-3:]
    assert first["train/loss"] == pytest.approx(math.log(2), abs=1e-6) and abs(first["dpo/margin"]) < 1e-6
    assert second["dpo/margin"] > 0 and second["offline/epoch"] == pytest.approx(8 / 6) and second["train/optimizer_steps"] == 1
    assert not {"dpo/margin", "train/ref_kl"} & online.keys() and online["rollout/tokens"] > 0 and online["sync/version"] == 2

    assert (straight / "hf/model.safetensors").read_bytes() == (branch / "hf/model.safetensors").read_bytes()
    exact = ("train/", "dpo/", "offline/", "reward/")
    for mine, its in zip(metrics(branch)[-2:], (second, online), strict=True):
        assert {k: v for k, v in mine.items() if k.startswith(exact)} == {k: v for k, v in its.items() if k.startswith(exact)}

    assert sorted(p.name for p in (straight / "profile").iterdir()) == ["phases.json", "rank_0.json.gz"]
    spans = [e for e in json.loads((straight / "profile" / "phases.json").read_text())["traceEvents"] if e["ph"] == "X"]
    assert {e["name"] for e in spans if e["args"]["step"] == 2} >= {"logprob", "update"}
    assert {e["name"] for e in spans if e["args"]["step"] == 3} >= {"sync", "rollout", "logprob", "logic", "update"}
