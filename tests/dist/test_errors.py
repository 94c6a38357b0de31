"""Invariant 6: an error on one rank ends all ranks within 10 seconds, with that error on the console and in status.json."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest

from tests.ranks import PROGRAMS, launch

pytestmark = pytest.mark.timeout(120)

# kind of failure -> what the message says, the state, the exit code in status.json
CASES = {
    "raise_tp": ("rank 1: ValueError: the cat sat on the keyboard", "crashed", 1),
    "preflight": ("no room on this host", "preflight", 3),
    "on_rank0": ("rank 0: ZeroDivisionError: division by zero", "crashed", 1),
    "exit": ("is gone without a word", "crashed", 1),
    "kill": ("is gone without a word", "crashed", 1),
}


@pytest.mark.parametrize("kind", CASES)
def test_all_ranks_end_soon_and_say_why(kind: str, tmp_path: Path) -> None:
    message, state, exit_code = CASES[kind]
    code, output = launch([str(PROGRAMS / "errors.py"), kind, str(tmp_path)], 2, 90)
    seconds = time.time() - float((tmp_path / "failed_at").read_text())
    found = json.loads((tmp_path / "r" / "status.json").read_text())
    print(f"{kind}: {seconds:.1f} s; {found['message']}")
    assert code not in (0, 124), output[-3000:]
    assert seconds < 20
    assert (found["state"], found["exit_code"]) == (state, exit_code), found
    assert message in found["message"], found
    assert "rank 0" in found["message"] if kind == "on_rank0" else "rank 1" in output
    assert message.rpartition(": ")[2] in output, output[-3000:]
    assert found["step"] == 1
