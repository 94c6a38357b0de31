"""Reading a run's own files, which a crash, a full disk or an editor may have damaged: what is whole, and what is wrong with the rest."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from megaflow.types import ConfigError

MOST_TOLD = 5  # damaged lines that a warning names


class Damaged(NamedTuple):
    """A line that cannot be used: its number in the file, from 1; its bytes without the line's end; what is wrong with it."""

    number: int
    raw: bytes
    reason: str


def json_lines(raw: Sequence[bytes], fault: Callable[[dict[str, Any]], str]) -> tuple[list[dict[str, Any]], list[Damaged]]:
    """The objects of a file's lines, and the lines that are none. `fault` says what an object lacks, "" if nothing."""
    lines, damaged = [], []
    for number, text in enumerate(raw, start=1):
        line, reason = _object(text)
        reason = reason or fault(line)
        if reason:
            damaged.append(Damaged(number, text, reason))
        else:
            lines.append(line)
    return lines, damaged


def told(path: Path, damaged: list[Damaged]) -> str:
    """For a warning: the file, and each line's number with what is wrong with it."""
    named = ", ".join(f"line {each.number} ({each.reason})" for each in damaged[:MOST_TOLD])
    more = f" and {len(damaged) - MOST_TOLD} more" if len(damaged) > MOST_TOLD else ""
    return f"{path}: {'a damaged line is' if len(damaged) == 1 else f'{len(damaged)} damaged lines are'} left out: {named}{more}"


def json_object(path: Path) -> dict[str, Any]:
    """Raises ConfigError when the file cannot be read or holds no JSON object."""
    found, reason = _object(_bytes(path))
    if reason:
        raise ConfigError(f"{path} is damaged: {reason}")
    return found


def yaml_object(path: Path) -> dict[str, Any]:
    """Raises ConfigError when the file cannot be read or holds no YAML mapping."""
    try:
        found = yaml.safe_load(_bytes(path).decode())
    except (yaml.YAMLError, ValueError) as error:
        raise ConfigError(f"{path} is damaged: {' '.join(str(error).split())}") from error
    if not isinstance(found, dict):
        raise ConfigError(f"{path} is damaged: it is empty or holds no sections")
    return found


def read_lines(path: Path) -> list[bytes]:
    """Split where a line of JSON ends and nowhere else: a string may hold U+2028. Raises ConfigError when the file cannot be read."""
    lines = _bytes(path).split(b"\n")
    return lines if lines[-1] else lines[:-1]


def _bytes(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}") from error


def _object(text: bytes) -> tuple[dict[str, Any], str]:
    """(the object, "") or ({}, what is wrong)."""
    if not text.strip():
        return {}, "empty"
    try:
        found = json.loads(text.decode())
    except UnicodeDecodeError:
        return {}, "not UTF-8 text"
    except json.JSONDecodeError as error:
        return {}, f"no JSON at character {error.pos + 1}: {error.msg}"
    except (ValueError, RecursionError) as error:  # a number of thousands of digits; thousands of brackets
        return {}, f"no JSON: {error}"
    return (found, "") if isinstance(found, dict) else ({}, "no JSON object")
