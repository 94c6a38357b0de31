"""What the benchmarks make of measured numbers; the measuring itself needs an engine and runs by hand."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from tools.bench import report, step

ROOT = Path(__file__).resolve().parents[2]


def line(number: int, seconds: float, device_gb: float) -> dict:
    phases = {"time/sync": 0.5, "time/rollout": 2.0, "time/reward": 0.25, "time/logprob": 1.0, "time/update": 3.0, "time/logic": 0.25}
    told = {"mem/rollout/device_gb": device_gb, "mismatch/logp_abs_diff": 0.01 * number, "rollout/tokens_per_s": 1000.0}
    return {"step": number, "time/step": seconds, **phases, **told, "time/startup_engine": 99.0}


LINES = [line(1, 60.0, 30.0), line(2, 9.0, 30.5), line(3, 8.0, 31.0), line(4, 7.0, 31.0), line(5, 8.0, 31.05)]


def test_warm_steps_count_and_memory_grows_from_the_third():
    found = step.figures_of(LINES, samples=64)
    assert found["step_s"] == 8.0 and found["samples_per_s"] == 8.0
    assert found["memory_growth_mb"] == pytest.approx(50.0) and found["memory_after_sleep_gb"] == 31.05
    assert found["mismatch"] == pytest.approx(0.04) and found["rollout_s"] == 2.0
    assert found["between_phases_s"] == pytest.approx(8.0 - 7.0), "phases add up to 7; the engine's start is none"


def test_overhead_is_what_the_phases_alone_do_not_explain():
    alone = {"rollout": 1.9, "reward": 0.2, "logprob": 1.0, "update": 2.9}
    found = step.against_alone(LINES, alone)
    assert found["overhead_s"] == pytest.approx(2.0) and found["overhead_of_step"] == pytest.approx(0.25)
    assert found["update_alone_s"] == 2.9


FILES = [
    {"tool": "rollout", "device": "X", "model": "m", "ours_over_bare": 0.98, "ours_tokens_per_s": 50000.4, "command": "python c",
     "versions": {}},
    {"rows": [{"what": "pull, proof off", "ms": 5.0, "gb_per_s": 600.0, "times SGLang, flattened buckets": 0.2},
              {"what": "pull, proof on", "ms": 12.0}], "ranks": 1, "folder": "a/b", "bytes": 3},
    {"update_mfu": 0.4, "logprobs_mfu": 0.5, "device": "X", "model": "m"},
    {"tool": "sleep", "kv_gb": 30.0, "sleep_and_wake_ms": 10.0},
]  # fmt: skip


def rows_of(text: str) -> dict[str, list[str]]:
    return {cells[0]: cells[1:] for cells in ([c.strip() for c in row.strip("|").split("|")] for row in text.splitlines()[2:])}


def test_the_table_says_what_is_reached_missed_and_not_measured():
    rows = rows_of(report.table(FILES))
    assert rows["rollout"][1:] == ["0.980 (m)", ">= 0.97", "reached", "X"]
    assert rows["sync"][1:4] == ["5.0 (b)", ">= 4", "reached"], "1 / 0.2"
    assert rows["sync with the proof"][1:4] == ["2.40 (b)", "<= 2", "**missed**"]
    assert rows["sync, 2 GPUs"][1] == "not measured", "that file is of one rank"
    assert rows["update"][1:4] == ["0.400 (m)", ">= 0.45", "**missed**"] and rows["log-probabilities"][3] == "reached"
    assert rows["sleep and wake of the engine"][1] == "not measured", "the goal is for 60 GB"
    assert rows["rollout, tokens/s"][1:4] == ["50,000 (m)", "reported", ""]
    assert report.versions(FILES) == "- X, : `python c`"


def test_the_table_is_written_between_its_marks(tmp_path, monkeypatch, capsys):
    page, file = tmp_path / "page.md", tmp_path / "rollout.json"
    page.write_text(f"before\n{report.BEGIN}\nthe table before\n{report.END}\nafter\n")
    file.write_text(json.dumps(FILES[0]))
    monkeypatch.setattr(sys, "argv", ["report.py", str(file), "--write", str(page)])
    assert report.main() == 0
    text = page.read_text()
    assert "the table before" not in text and "0.980 (m)" in text and text.startswith("before\n") and text.endswith("after\n")
    assert "0.980 (m)" in capsys.readouterr().out
    with pytest.raises(ValueError, match="table: begin"):
        report.replaced("no marks", [])


def test_figures_of_other_benchmarks_and_models_stay():
    """m's rollout is measured again; its update, and n's rollout, are not."""
    again = {**FILES[0], "ours_over_bare": 0.5, "command": "python tools/bench/rollout.py m --again"}
    first = [{**FILES[0], "command": "python tools/bench/rollout.py m"}, FILES[2], {**FILES[0], "model": "n", "ours_over_bare": 0.9}]
    page = report.replaced(report.replaced(f"{report.BEGIN}\n{report.END}", first), [again])
    lines = [line for line in page.splitlines() if line.startswith(("| rollout |", "| update |", "| sync |", "- X"))]
    assert [line.split("|")[3].strip() for line in lines[:4]] == ["0.900 (n)", "0.500 (m)", "not measured", "0.400 (m)"]
    assert [line.rpartition(": ")[2] for line in lines[4:]] == ["`python c`", "`python tools/bench/rollout.py m --again`"]


def test_every_figure_has_its_benchmark_and_the_page_names_it():
    page = (ROOT / "docs/benchmarks.md").read_text()
    for tool in {row.tool for row in report.ROWS}:
        assert (ROOT / f"tools/bench/{tool}.py").is_file() and f"tools/bench/{tool}.py" in page, tool
