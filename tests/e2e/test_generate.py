"""Generation killed at several moments gives the bytes of the undisturbed one, and nothing is written over a finished file."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest

from tests.e2e.program import run, write_config
from tests.ranks import PROGRAMS, run_ranks
from tools.make_tiny_model import make

KILLS, PROMPTS, SAMPLES, CHUNK = 2, 34, 3, 5


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("made")
    make(folder / "model", data=folder / "data")
    return folder


def config(made: Path, name: str) -> str:
    source = {"path": str(made / "data" / "train.jsonl"), "name": "sums", "limit": PROMPTS}
    generate = {"samples": SAMPLES, "chunk": CHUNK, "output": str(made / name / "samples.jsonl")}
    return write_config(made / f"{name}.yaml", made, parallel={"tp": 1}, data={"train": [source]}, generate=generate)


def test_killed_and_resumed_it_writes_the_same_bytes_and_a_finished_file_is_kept(made: Path) -> None:
    (found,) = run_ranks("generate_killed", 1, config(made, "straight"), config(made, "killed"), str(KILLS), timeout=250)
    assert found["codes"] == [0, 0, 2] and "samples.jsonl is finished; delete it" in found["said"]
    assert found["seen"] == sorted(found["seen"]) and found["seen"][0] >= 1 and found["seen"][-1] < -(-PROMPTS // CHUNK)

    straight = (made / "straight" / "samples.jsonl").read_bytes()
    lines = [json.loads(line) for line in straight.splitlines()]
    assert [(x["id"], x["index"]) for x in lines] == [(f"sums:{i}", k) for i in range(1, PROMPTS + 1) for k in range(SAMPLES)]
    assert all(len(x["response_ids"]) == len(x["rollout_logp"]) > 0 for x in lines) and len({x["response"] for x in lines}) > 50
    assert (made / "killed" / "samples.jsonl").read_bytes() == straight
    assert sorted(p.name for p in (made / "killed").iterdir()) == [f"samples.jsonl{x}" for x in ("", ".json", ".metrics.jsonl")]

    metrics = [json.loads(line) for line in (made / "killed" / "samples.jsonl.metrics.jsonl").read_text().splitlines()]
    last = PROMPTS % CHUNK * SAMPLES
    assert metrics[-1]["step"] == 7 and metrics[-1]["generate/lines"] == last and metrics[-1]["generate/samples_per_s"] > 0


EVALUATE = pytest.param("launch/evaluate.py", "eval", marks=pytest.mark.extra)


@pytest.mark.parametrize(("script", "phase"), [("launch/generate.py", "rollout"), EVALUATE])
def test_a_rank_that_stands_still_is_named_and_all_of_it_ends(made: Path, script: str, phase: str, monkeypatch: pytest.MonkeyPatch) -> None:
    name = f"stuck_{phase}"
    monkeypatch.setenv("STUCK_AT", str(made / f"{name}_at"))
    sums = [{"path": str(made / "data" / "train.jsonl"), "name": name, "limit": 8} for name in ("sums", "more")]
    generate = {"chunk": 4, "output": str(made / "runs" / name / "samples.jsonl")}
    config = write_config(
        made / f"{name}.yaml", made, data={"train": sums[:1], "eval": sums}, rollout={"backend": f"{PROGRAMS / 'stuck.py'}:rollout"},
        generate=generate, watchdog={"first_factor": 1.0, "phases": {phase: 3.0}},
    )  # fmt: skip
    code, output = run(made, 2, script, "--config", config, timeout=120)
    assert code != 0 and f"rank 1 works in `{phase}" in output.replace("Rank", "rank") and "in generate" in output, output[-4000:]
    seconds = time.time() - float((made / f"{name}_at").read_text())
    (report,) = (made / "runs" / name).glob("stall-*/report.txt")
    assert "stuck.py" in report.read_text() and seconds < 30
