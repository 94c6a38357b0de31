"""Whatever phase a rank is stuck in, and in whatever way: the run ends, with code 6, and its report names the rank and what it was in."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from tests.ranks import PROGRAMS, launch

pytestmark = pytest.mark.timeout(240)

PHASES = {"sync": 1, "rollout": 1, "reward": 0, "logprob": 1, "logic": 0, "update": 1, "eval": 1, "save": 1}  # -> the rank that is stuck
STUCK = r"rank (\d) waits in (?P<what>.+), number \d+ \(`(?P<waits>.+?)`\) for rank (?P<culprit>\d)\. Rank (?P=culprit) (?P<how>.*)"


@pytest.fixture(scope="module")
def root(tmp_path_factory) -> Path:
    """All jobs at once: they import once, and wait most of the time."""
    root = tmp_path_factory.mktemp("stalls")
    code, output = launch([str(PROGRAMS / "stalls.py"), str(root)], 1, 120)
    assert code == 0, output[-3000:]
    return root


def ended(root: Path, job: str) -> tuple[dict, list, str]:
    """status.json, the exit codes by rank (so they have ended), the report."""
    status = json.loads((root / job / "status.json").read_text())
    ends = json.loads((root / f"{job}.json").read_text())
    reports = list((root / job).glob("stall-*/report.txt"))
    assert len(reports) == (0 if status["exit_code"] == 0 else 1), "one rank reports"
    codes = [ends[rank][0] for rank in sorted(ends)]
    return status, codes, reports[0].read_text() if reports else ""


@pytest.mark.parametrize("phase", PHASES)
def test_in_each_phase_the_report_says_which_rank_is_stuck_where(root: Path, phase: str) -> None:
    status, codes, report = ended(root, phase)
    culprit = PHASES[phase]
    assert (status["state"], status["exit_code"], codes) == ("stalled", 6, [6, 6])
    found = re.search(STUCK, status["message"])
    assert found and found["what"] == "barrier of ranks 0-1" and found["waits"] == phase, status["message"]
    assert int(found["culprit"]) == culprit and found["how"].startswith(f"works in `{phase}: item 3 of 8`, for "), status["message"]
    row = next(line for line in report.splitlines() if line.startswith(str(culprit)))
    assert row.split()[3:8] == ["2", phase, "item", "3", "of"] and row.endswith("working"), report
    assert f"in stuck_in_{phase}" in report.partition(f"--- rank {culprit}")[2], "the stack of who does not wait"
    seconds = float(found["how"].partition(", for ")[2].split()[0])
    assert 2 <= seconds < 20, "the limit is 2 s; many jobs share the machine"
    files = [next((root / phase).glob(f"stall-*/rank{rank}.txt")).read_text() for rank in (0, 1)]
    assert f" in stuck_in_{phase}" in files[culprit] and " in barrier" in files[1 - culprit]
    log = (root / f"{phase}.log").read_text()
    assert log.count("the run has stalled") == 1, "printed once"


@pytest.mark.parametrize(
    ("job", "culprit", "state", "function"),
    [
        ("stopped1", 1, "T (stopped)", "stop_oneself"),
        ("stopped0", 0, "T (stopped)", "stop_oneself"),
        ("gil", 1, "R (running)", "match_for_ever"),
    ],
)
def test_a_rank_that_runs_no_python_is_found_by_the_other_which_gets_its_stack_and_ends_it(
    root: Path, job: str, culprit: int, state: str, function: str
) -> None:
    """Rank 0 holds the store between the ranks: with it stopped, rank 1 finds out and reports alone."""
    status, codes, report = ended(root, job)
    assert (status["state"], status["exit_code"]) == ("stalled", 6) and codes[culprit] == -9 and codes[1 - culprit] == 6
    found = re.search(STUCK, status["message"])
    assert found and int(found["culprit"]) == culprit and found["how"].startswith("is in `update"), status["message"]
    assert f"and does not answer: {state}" in status["message"]
    assert f" in {function}" in report
    assert f" in {function}" in next((root / job).glob(f"stall-*/rank{culprit}.txt")).read_text()


def test_a_rank_of_another_host_is_known_by_what_it_told(root: Path) -> None:
    status, codes, report = ended(root, "far")
    assert codes == [6, 6] and "for rank 1. Rank 1 works in `update: item 3 of 8`" in status["message"]
    assert "in stuck_in_update" in report and "host0" in report and "host1" in report


def test_a_host_that_is_gone(root: Path) -> None:
    status, codes, _ = ended(root, "far_gone")
    assert codes[0] == 6 and re.search(r"for rank 1\. Rank 1 (was last heard of in|has never said)", status["message"])
    assert "its host does not answer" in status["message"]


def test_ranks_in_different_collectives(root: Path) -> None:
    status, codes, _ = ended(root, "crossed")
    assert codes == [6, 6] and "every rank waits, they are in different collectives" in status["message"]
    assert "rank 0 waits in barrier of ranks 0-1, number " in status["message"]
    assert "rank 1 waits in barrier of ranks 0-1, data_parallel, number 2 (`update`) for rank 0" in status["message"]


def test_a_long_phase_that_moves_is_no_stall(root: Path) -> None:
    """Twice the limit, with a sign of progress every fifth of it; the other rank waits for all of that time."""
    status, codes, _ = ended(root, "moving")
    assert (status["state"], codes) == ("done", [0, 0])


def test_one_rank_alone(root: Path) -> None:
    status, codes, report = ended(root, "alone")
    assert (status["exit_code"], codes) == (6, [6]) and "rank 0 works in `update`" in status["message"] and "in sleeps_alone" in report


def test_one_rank_alone_that_holds_the_gil_is_ended_by_the_timer_in_c(root: Path) -> None:
    codes = json.loads((root / "alone_gil.json").read_text())
    assert codes["0"][0] == 1
    assert "in match_for_ever" in (root / "alone_gil.log").read_text()
