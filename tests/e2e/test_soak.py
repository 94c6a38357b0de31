"""A short soak, tests/programs/soak.py: steps under random faults end as without them."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.ranks import ROOT, clean_env


@pytest.mark.extra
@pytest.mark.timeout(900)
def test_steps_under_random_faults_end_as_the_undisturbed_run() -> None:
    command = [sys.executable, "-m", "tests.programs.soak", "--steps", "24", "--sglang-steps", "0", "--every", "6"]
    done = subprocess.run(command, cwd=ROOT, env=clean_env(), capture_output=True, text=True, timeout=850)
    print(done.stdout[-3000:])
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert "faults" in done.stdout
