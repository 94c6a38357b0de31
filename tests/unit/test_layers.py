"""Imports go down only, and siblings on one line of the layer picture (CONTRIBUTING.md) never import each other."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
LAYERS = (
    ("types", "registry", "config", "shape", "background"),
    ("parallel", "monitor", "slurm"),
    ("data", "algo", "rewards"),
    ("actor", "rollout", "weights", "checkpoint", "plan"),
    ("convert",),
    ("trainer",),
    ("cli",),
)
LEVEL = {room: level for level, rooms in enumerate(LAYERS) for room in rooms}
# within L0, in one direction
L0_ORDER = ("types", "shape", "registry", "config")
MEGATRON_ROOMS = {"actor", "checkpoint", "weights"}
SHIM = "parallel/megatron_shim.py"  # the one file that mends megatron-core itself


def imports(path: Path) -> Iterator[tuple[str, bool, int]]:
    """(dotted name, is it at module level, line) of each import; `from a import b` counts as a.b, for b may be a module."""
    tree = ast.parse(path.read_text())
    inside = {id(n) for f in ast.walk(tree) if isinstance(f, ast.FunctionDef | ast.AsyncFunctionDef) for n in ast.walk(f)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((alias.name, id(node) not in inside, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            here = ".".join((path.parent if node.level else ROOT).relative_to(ROOT).parts[: -(node.level - 1) or None])
            base = ".".join(filter(None, [here, node.module]))
            yield from ((f"{base}.{alias.name}", id(node) not in inside, node.lineno) for alias in node.names)


def violation(room: str, name: str, at_top: bool) -> str | None:
    """Why `room` may not import `name`; None if it may."""
    parts = name.split(".")
    may_group = room == "parallel" and name.startswith("megatron.core.parallel_state")
    if parts[0] == "megatron" and room not in MEGATRON_ROOMS and not may_group:
        return "megatron belongs to actor/, checkpoint/ and weights/ (parallel/ may use megatron.core.parallel_state)"
    if parts[0] == "sglang" and (room != "rollout" or at_top):
        return "sglang belongs to rollout/, inside functions"
    target = parts[1] if parts[0] == "megaflow" and len(parts) > 1 else room
    if target == room or target == "__version__" or LEVEL[target] < LEVEL[room]:
        return None
    if {room, target} <= set(L0_ORDER) and L0_ORDER.index(target) < L0_ORDER.index(room):
        return None
    return f"{room} (L{LEVEL[room]}) may not import {target} (L{LEVEL[target]})"


def test_imports_go_down() -> None:
    found = []
    for path in sorted((ROOT / "megaflow").rglob("*.py")):
        room = path.relative_to(ROOT / "megaflow").parts[0].removesuffix(".py")
        if room == "__init__":
            assert not [name for name, _, _ in imports(path) if not name.startswith("__future__")], "megaflow/__init__.py imports nothing"
            continue
        assert room in LEVEL, f"{path}: {room} has no place in the layer picture"
        if path.relative_to(ROOT / "megaflow").as_posix() == SHIM:
            room = "actor"  # judged as one of megatron's rooms; parallel/ imports nothing else of L3, as the other files show
        reasons = [(name, line, violation(room, name, at_top)) for name, at_top, line in imports(path)]
        found += [f"{path.relative_to(ROOT)}:{line}: {name}: {why}" for name, line, why in reasons if why]
    assert not found, "\n".join(found)


def test_the_rules_catch_what_they_should(tmp_path: Path) -> None:
    assert violation("actor", "megaflow.rollout.base", True)
    assert violation("monitor", "megaflow.parallel.mesh", True)
    assert violation("data", "megaflow.trainer.run", False)
    assert violation("types", "megaflow.config.schema", True)
    assert violation("rollout", "sglang", True) and violation("trainer", "sglang.Engine", False)
    assert violation("trainer", "megatron.core", False) and violation("parallel", "megatron.core.optimizer", False)
    assert not violation("parallel", "megatron.core.parallel_state", True)
    assert not violation("rollout", "sglang.Engine", False)
    assert not violation("trainer", "megaflow.actor.engine", True)


def test_command_line_loads_no_torch() -> None:
    heavy = ("torch", "numpy", "transformers", "megatron", "sglang")
    code = f"import megaflow.cli, sys; print([m for m in {heavy!r} if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout.strip()) == (0, "[]"), done.stderr
