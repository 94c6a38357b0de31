"""The tools that look at a run: report.py, compare_runs.py, and the traces of profile.steps."""

from __future__ import annotations

import gzip
import json
import re
import shutil
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from megaflow.config.steps import parse_steps
from megaflow.monitor.metrics import Metrics
from megaflow.monitor.profiler import Profiler, write_timeline
from megaflow.monitor.svg import Series, line_chart, number, stacked_bars, thinned, ticks
from megaflow.types import ConfigError
from tools import compare_runs, report

ROOT = Path(__file__).parents[2]
EVIL = '</pre><script>alert("x")</script>\x1b[2J & "quotes"'


def run_dir(path: Path, rewards: list[float], lr: float) -> Path:
    """A run of so many steps, as a run leaves it."""
    (path / "samples").mkdir(parents=True)
    metrics = Metrics(path / "metrics.jsonl")
    metrics.write(0, {"eval/sums/accuracy": 0.25})
    for step, reward in enumerate(rewards, start=1):
        times = {"time/rollout": 2.0, "time/update": 1.5, "time/step": 4.0}
        more = {"batch/tokens": 300.0, "sync/bytes": 1e6, "mem/peak_gb": 1.0, "mismatch/k3": 1e-4, "train/kl": float("nan")}
        metrics.write(step, {"reward/mean": reward, "rollout/len_mean": 10.0 * step, **times, **more})
        line = {"id": "sums:1", "group": 0, "prompt": "1+1?", "answer": "2", "parts": {}, "response_tokens": 3, "finish": "stop"}
        ends = enumerate((("2", 1.0), (EVIL, 0.0)))
        both = [{**line, "index": i, "response": r, "reward": v, "advantage": v - 0.5} for i, (r, v) in ends]
        (path / f"samples/step_{step}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in both))
    metrics.write(len(rewards) + 1, {"eval/sums/accuracy": 0.75, "reward/mean": rewards[-1]})
    (path / "config.yaml").write_text(yaml.safe_dump({"run": {"name": path.name, "steps": 3}, "actor": {"lr": lr}, "model": {"path": "m"}}))
    (path / "status.json").write_text(json.dumps({"state": "done", "step": len(rewards), "message": ""}))
    return path


@pytest.fixture
def runs(tmp_path: Path) -> tuple[Path, Path]:
    return run_dir(tmp_path / "first", [0.2, 0.3, 0.6], 1e-3), run_dir(tmp_path / "second", [0.2, 0.3], 2e-3)


class Page(HTMLParser):
    """Tags that are open at the end, all attributes, and the text."""

    VOID = ("meta", "link", "img", "line", "rect", "polyline", "circle")

    def __init__(self, text: str):
        super().__init__()
        self.open: list[str] = []
        self.attributes: list[tuple[str, str, str]] = []
        self.tags: set[str] = set()
        self.text = ""
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self.attributes += [(tag, name, value or "") for name, value in attrs]
        if tag not in self.VOID or (tag == "rect" and ("class", "tip") in attrs):
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self.attributes += [(tag, name, value or "") for name, value in attrs]

    def handle_endtag(self, tag: str) -> None:
        assert self.open and self.open.pop() == tag, (tag, self.open)

    def handle_data(self, data: str) -> None:
        self.text += data


def tool(name: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(ROOT / f"tools/{name}.py"), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, cwd=ROOT)


def test_report_is_one_page_that_asks_for_nothing_and_obeys_no_response(runs: tuple[Path, Path]) -> None:
    done = tool("report", *map(str, runs))
    assert done.returncode == 0, done.stderr
    page = Page((runs[0] / "report.html").read_text())
    assert not page.open and not page.tags & {"script", "link", "img", "iframe", "object"}
    assert not [a for a in page.attributes if a[1] in ("src", "href", "srcset", "onload") or ("://" in a[2] and a[1] != "xmlns")]
    assert '</pre><script>alert("x")</script>\\x1b[2J & "quotes"' in page.text and "\x1b" not in page.text
    for shown in ("first", "done, step 3 of 3", "0.425 → 0.425", "0.25 → 0.75 (step 4)", "seconds of a step, by phase"):
        assert shown in page.text, shown
    assert "rollout 2" in page.text and "other 0.5" in page.text  # of the 4 seconds 3.5 are in phases
    assert re.search(r"actor\.lr0\.0010\.002", page.text) and "run.name0" not in page.text  # the row of the difference: key, both values
    assert "stroke-dasharray" in (runs[0] / "report.html").read_text() and "train/kl" not in [a[2] for a in page.attributes]


@pytest.mark.skipif(shutil.which("chromium") is None, reason="needs chromium")
def test_a_browser_shows_the_report(runs: tuple[Path, Path], tmp_path: Path) -> None:
    """Parsed as written, nothing on its console, and nothing wider than a telephone's screen but what scrolls by itself."""
    assert tool("report", *map(str, runs)).returncode == 0
    script = "<script>document.title = `${document.documentElement.scrollWidth} of ${innerWidth}`</script>"
    looked_at = tmp_path / "looked_at.html"
    looked_at.write_text((runs[0] / "report.html").read_text() + script)
    quiet = ["--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--enable-logging=stderr"]
    command = ["chromium", *quiet, f"--user-data-dir={tmp_path / 'profile'}", "--window-size=500,800", "--dump-dom", looked_at.as_uri()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr[-2000:]
    assert "<title>500 of 500</title>" in done.stdout and "CONSOLE" not in done.stderr
    assert done.stdout.count("<svg") == (runs[0] / "report.html").read_text().count("<svg") > 5
    assert "<h2>Configuration</h2>" in done.stdout


def test_report_of_what_is_no_run(tmp_path: Path) -> None:
    done = tool("report", str(tmp_path))
    assert done.returncode == 2 and "is it a run directory" in done.stderr and "Traceback" not in done.stderr


def test_report_of_a_damaged_run_is_made_and_says_so(runs: tuple[Path, Path]) -> None:
    path = runs[0]
    lines = (path / "metrics.jsonl").read_bytes().splitlines()
    (path / "metrics.jsonl").write_bytes(b"\n".join([lines[0], b"garbage\0", *lines[1:], b""]))
    (path / "status.json").write_text('{"state')
    (path / "samples/step_2.jsonl").write_text("{\n")
    (path / "samples/step_x.jsonl").touch()
    (runs[1] / "config.yaml").unlink()
    done = tool("report", *map(str, runs))
    assert done.returncode == 0, done.stderr
    said = done.stderr.splitlines()
    assert len(said) == 4 and f"{path}/metrics.jsonl: a damaged line is left out: line 2 (no JSON" in said[0]
    assert "status.json is damaged" in said[1] and "step_x.jsonl" in said[2] and "step_2.jsonl: a damaged line" in said[3]
    text = Page((path / "report.html").read_text()).text
    assert "unknown, step 4 of 3" in text and "0.425 → 0.425" in text and "step 1: mean reward 0.500 of 2" in text and "step 2:" not in text
    assert "No config.yaml that can be read: second." in text and "the same configuration" not in text


@pytest.mark.parametrize(
    ("out", "said"), [("no/such/x.html", "make that directory first"), ("", "is a directory"), ("file/x.html", "cannot be written")]
)
def test_report_that_cannot_be_written(out: str, said: str, runs: tuple[Path, Path], tmp_path: Path, capsys) -> None:
    (tmp_path / "file").touch()
    assert report.main([str(runs[0]), "--out", str(tmp_path / out)]) == 2
    error = capsys.readouterr().err
    assert said in error and "--out" in error and str(tmp_path / out) in error and error.count("\n") == 1


def test_report_takes_two_runs_at_most_and_says_where_more_go(runs: tuple[Path, Path], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        report.main([*map(str, runs), str(runs[0])])
    with pytest.raises(SystemExit, match="0"):
        report.main(["--help"])
    assert "one at most: compare_runs.py takes more" in " ".join(capsys.readouterr().out.split())


def test_a_curve_lies_where_its_numbers_say() -> None:
    """420 x 190 with margins 52, 10, 26, 22: x from 52 to 410, y from 168 up to 26; 6% of the span is left free above and below."""
    chart = line_chart("t", [Series("a", [(0.0, 1.0), (10.0, 2.0)], "#123456")])
    (x0, y0), (x1, y1) = (map(float, p.split(",")) for p in re.search(r'points="([^"]+)"', chart)[1].split())
    assert (x0, x1) == (52.0, 410.0)
    assert (y0, y1) == pytest.approx((168 - 142 * 0.06 / 1.12, 168 - 142 * 1.06 / 1.12), abs=0.06)
    assert line_chart("t", [Series("a", [], "#123456")]) == ""


def test_names_that_find_no_room_beside_the_title_go_below_it() -> None:
    """Names of 10 px letters; each line of them makes the chart 13 px higher and leaves the curves as high as they were."""
    few = [Series(f"run {i}", [(0.0, 1.0), (1.0, 2.0)], "#123456") for i in range(2)]
    many = [Series(f"rollout/len_mean (run {i})", s.points, s.color) for i, s in enumerate(few)]
    charts = [line_chart("response length, tokens", series) for series in (few, many)]
    heights = [int(float(re.search(r' height="([\d.]+)"', chart)[1])) for chart in charts]
    assert heights == [190, 203] or heights == [190, 216], heights
    spans = [[float(p.split(",")[1]) for p in re.search(r'points="([^"]+)"', chart)[1].split()] for chart in charts]
    assert spans[0][0] - spans[0][1] == pytest.approx(spans[1][0] - spans[1][1], abs=0.11)


def test_memory_by_phase(runs: tuple[Path, Path]) -> None:
    metrics = Metrics(runs[0] / "metrics.jsonl", resume_step=2)
    metrics.write(3, {f"mem/{phase}/{side}_gb": 1.5 for phase in ("rollout", "update") for side in ("actor", "engine")})
    assert tool("report", str(runs[0])).returncode == 0
    text = Page((runs[0] / "report.html").read_text()).text
    assert "most that the trainer held in a phase, GB" in text and "most that the engine held in a phase, GB" in text
    assert text.count("■ rollout■ update") == 3  # names of the two, and of the phases' seconds


def test_a_long_run_is_small(tmp_path: Path) -> None:
    """Curves are thinned to what a chart can show: 1,000 steps are no larger than 400."""
    charts = [line_chart("t", [Series("a", [(float(i), float(i % 7)) for i in range(count)], "#123456")]) for count in (400, 1000)]
    assert abs(len(charts[0]) - len(charts[1])) < 0.4 * len(charts[0])


def test_bars_stand_on_each_other() -> None:
    chart = stacked_bars("t", [1, 2], {"a": [1.0, 2.0], "b": [3.0, 1.0]})
    bars = [tuple(map(float, m)) for m in re.findall(r'<rect x="([\d.]+)" y="([\d.]+)" width="[\d.]+" height="([\d.]+)" fill', chart)]
    a1, a2, b1, b2 = bars
    assert a1[1] + a1[2] == pytest.approx(208, abs=0.11) and b1[1] + b1[2] == pytest.approx(a1[1], abs=0.11)
    assert b1[2] == pytest.approx(3 * a1[2], rel=0.01) and a2[2] == pytest.approx(2 * b2[2], rel=0.01)


def test_axes_are_marked_with_round_numbers() -> None:
    assert ticks(0.0, 1.0) == pytest.approx([0, 0.5, 1.0]) and ticks(0.55, 1.45) == pytest.approx([0.6, 0.8, 1.0, 1.2, 1.4])
    assert ticks(-3, 17) == [0, 5, 10, 15] and ticks(2.0, 2.0) == [2.0]
    assert [number(v) for v in (0, 1234.4, 12345, 3e6, 0.05, 3e-7)] == ["0", "1,234", "12.3k", "3M", "0.05", "3e-07"]
    assert thinned([(float(i), float(i)) for i in range(10)], 5) == [(0.5, 0.5), (2.5, 2.5), (4.5, 4.5), (6.5, 6.5), (8.5, 8.5)]


def test_runs_are_compared(runs: tuple[Path, Path], capsys: pytest.CaptureFixture[str]) -> None:
    assert compare_runs.main([*map(str, runs), "--metrics", "reward/mean"]) == 0
    out = capsys.readouterr().out
    assert re.search(r"actor\.lr +0\.001 +0\.002\n", out) and "model.path" not in out
    assert re.search(r"reward, last 5 steps +0\.425 +0\.267\n", out) and re.search(r"sums/accuracy +0\.250 -> 0\.750", out)
    assert re.search(r"first +0\.2 ▁▃██ +0\.6\n +second +0\.2 ▁▃▃ +0\.3\n", out)  # one scale, of 0.2 to 0.6
    assert compare_runs.main([str(runs[0])]) == 2 and "at least two" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("metric", "said"),
    [
        ("foo/bar", "there are batch/tokens, eval/sums/accuracy, mem/peak_gb"),
        ("reward/maen", "did you mean reward/mean"),
        ("step", "no such"),
    ],
)
def test_a_metric_that_no_run_has(metric: str, said: str, runs: tuple[Path, Path], capsys: pytest.CaptureFixture[str]) -> None:
    assert compare_runs.main([*map(str, runs), "--metrics", "reward/mean", metric]) == 2
    out, error = capsys.readouterr()
    assert f"--metrics {metric}: no such metric in these runs" in error and said in error and not out


def test_a_metric_without_a_finite_value_is_there_with_a_dash(runs: tuple[Path, Path], capsys: pytest.CaptureFixture[str]) -> None:
    assert compare_runs.main([*map(str, runs), "--metrics", "train/kl"]) == 0
    assert re.search(r"train/kl\n +first +-\n +second +-\n", capsys.readouterr().out)


def test_a_run_without_its_configuration_is_not_called_the_same(runs: tuple[Path, Path], capsys: pytest.CaptureFixture[str]) -> None:
    (runs[1] / "config.yaml").unlink()
    assert compare_runs.main([*map(str, runs)]) == 0
    out = capsys.readouterr().out
    assert f"no config.yaml that can be read in {runs[1]}\n" in out and "nothing to compare" in out and "the same" not in out
    third = run_dir(runs[0].parent / "third", [0.2], 3e-3)
    assert compare_runs.main([*map(str, runs), str(third)]) == 0
    out = capsys.readouterr().out
    assert f"read in {runs[1]}\n" in out and re.search(r"actor\.lr +0\.001 +0\.003\n", out)


# --- profile.steps -----------------------------------------------------------------------------------------------------------------


def test_steps_as_written() -> None:
    assert [parse_steps(text) for text in ("", "5", "5-6", "2, 8-9")] == [set(), {5}, {5, 6}, {2, 8, 9}]
    for text in ("6-5", "0", "a", "1-", "-3"):
        with pytest.raises(ConfigError, match="are no steps"):
            parse_steps(text)


def test_a_trace_of_the_steps_asked_for(tmp_path: Path) -> None:
    profiler = Profiler(tmp_path / "profile", 3, {2, 3})
    over = []
    for step in range(1, 6):
        over.append(profiler.begin_step(step))
        with profiler.phase("update"):
            torch.ones(4, 4) @ torch.ones(4, 4)
    assert over == [False, False, False, True, False] and [(e[0], e[1]) for e in profiler.events] == [("update", 2), ("update", 3)]
    names = [e.get("name") for e in json.loads(gzip.decompress((tmp_path / "profile/rank_3.json.gz").read_bytes()))["traceEvents"]]
    assert names.count("phase: update") == 2 and names.count("aten::mm") == 2


def test_phases_of_all_ranks_on_one_line_each(tmp_path: Path) -> None:
    by_rank = [[("sync", 5, 100.0, 100.5)], [("sync", 5, 100.25, 100.5), ("update", 5, 101.0, 103.0)]]
    write_timeline(tmp_path / "profile/phases.json", by_rank)
    rows: list[dict[str, Any]] = json.loads((tmp_path / "profile/phases.json").read_text())["traceEvents"]
    spans = [(r["tid"], r["name"], r["ts"], r["dur"], r["args"]["step"]) for r in rows if r["ph"] == "X"]
    assert spans == [(0, "sync", 0.0, 5e5, 5), (1, "sync", 2.5e5, 2.5e5, 5), (1, "update", 1e6, 2e6, 5)]
    assert [r["args"]["name"] for r in rows if r["name"] == "thread_name"] == ["rank 0", "rank 1"]
