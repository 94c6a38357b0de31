"""README, CHANGELOG, CONTRIBUTING and docs/: their blocks and the commands in them."""

from __future__ import annotations

import itertools
import re
import shlex
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGES = sorted([ROOT / name for name in ("README.md", "CHANGELOG.md", "CONTRIBUTING.md")] + list((ROOT / "docs").glob("*.md")))
SHELL = ("sh", "bash", "console")
NEEDS = re.compile(r"# needs: (\S.*)")  # first line of a block whose commands want what a test machine has not


def name_of(page: Path) -> str:
    return str(page.relative_to(ROOT))


def blocks(page: Path) -> Iterator[tuple[str, list[str]]]:
    """(language, lines) of each fenced block; the indented lines outside of them come as one block "indented"."""
    language: str | None = None
    lines: list[str] = []
    indented: list[str] = []
    for line in page.read_text().splitlines():
        if line.startswith("```"):
            if language is None:
                language, lines = line.removeprefix("```").strip(), []
            else:
                yield language, lines
                language = None
        elif language is not None:
            lines.append(line)
        elif line.startswith("    "):
            indented.append(line.strip())
    assert language is None, f"{page}: a code block is not closed"
    yield "indented", indented


def marked_commands(page: Path) -> list[tuple[str, list[str]]]:
    """(what it needs beside a CPU, e.g. "1 GPU", or ""; its words) of each command: lines of shell blocks, and indented ones that look so.

    Leading VARIABLE=value and what follows two spaces or a # are left out; a line that ends with \\ goes on with the next.
    """
    found = []
    for language, lines in blocks(page):
        is_shell = language in SHELL
        marked = NEEDS.fullmatch(lines[0]) if is_shell and lines else None
        joined = re.sub(r"\\\n\s*", "", "\n".join(lines)).splitlines()
        for line in joined if is_shell else [line for line in joined if language == "indented" and _is_command(line)]:
            words = shlex.split(re.split(r"\s{2,}|(?:^|\s)#", line.strip().removeprefix("$ "))[0], posix=True)
            words = list(itertools.dropwhile(lambda word: re.fullmatch(r"[A-Z_]+=\S*", word), words))
            found += [(marked[1] if marked else "", words)] if words else []
    return found


def commands(page: Path) -> list[list[str]]:
    return [words for _, words in marked_commands(page)]


def _is_command(line: str) -> bool:
    return re.match(r"\s*(\$ )?([A-Z_]+=\S+ )*(\.venv/bin/)?(python|torchrun|make|\.ci/run|pip|touch|export)\b", line) is not None
