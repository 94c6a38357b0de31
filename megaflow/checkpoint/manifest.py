"""manifest.json: what a checkpoint consists of, written last. Without it, or with a file of another size, there is no checkpoint."""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from megaflow.monitor.progress import mark

NAME = "manifest.json"
FORMAT = 1
_CHUNK = 1 << 22  # bytes read at once


@dataclass(frozen=True)
class FileEntry:
    """One file: its size and zlib.crc32 of its content. The sum finds damage, not malice."""

    bytes: int
    crc32: str


@dataclass(frozen=True)
class Manifest:
    """layout: number of ranks and sizes of the axes; model: sizes that must agree when loading; files: by name within the directory;
    scores: metrics of the step that was saved, to tell the best checkpoint by."""

    format: int
    step: int
    layout: dict[str, int]
    model: dict[str, Any]
    versions: dict[str, str]
    files: dict[str, FileEntry]
    scores: dict[str, float] = field(default_factory=dict)


class BadManifest(ValueError):
    """manifest.json is not one of ours, or not as it was written."""


def measure(path: Path) -> FileEntry:
    """Read the file once."""
    size = crc = 0
    with path.open("rb") as f:
        while chunk := f.read(_CHUNK):
            size, crc = size + len(chunk), zlib.crc32(chunk, crc)
    return FileEntry(size, f"{crc:08x}")


def write(directory: Path, manifest: Manifest) -> None:
    content = asdict(manifest)
    write_durably(directory / NAME, json.dumps({"crc32": _digest(content), **content}, indent=1).encode())


def read(directory: Path) -> Manifest:
    """Raises FileNotFoundError or BadManifest."""
    try:
        content = json.loads((directory / NAME).read_text())
        written = content.pop("crc32")
    except (UnicodeDecodeError, json.JSONDecodeError, KeyError, AttributeError, TypeError) as error:
        raise BadManifest(f"{directory / NAME} cannot be read: {type(error).__name__}: {error}") from error
    if written != _digest(content):
        raise BadManifest(f"{directory / NAME} is damaged: its checksum differs from the one written with it")
    if content["format"] != FORMAT:
        raise BadManifest(f"{directory / NAME} is of format {content['format']}; this version of megaflow reads format {FORMAT}")
    if unknown := content.keys() - {each.name for each in fields(Manifest)}:
        by = content.get("versions", {}).get("megaflow", "?")
        raise BadManifest(f"{directory / NAME} was written by another version of megaflow ({by}): it has {', '.join(sorted(unknown))}")
    return Manifest(**{**content, "files": {name: FileEntry(**entry) for name, entry in content["files"].items()}})


def missing(directory: Path, manifest: Manifest) -> list[str]:
    """What is not there or has another size; contents are not read."""
    found = []
    for name, entry in manifest.files.items():
        try:
            size = (directory / name).stat().st_size
        except FileNotFoundError:
            found.append(f"{directory / name} is missing")
            continue
        if size != entry.bytes:
            found.append(f"{directory / name} is damaged: {size:,} bytes, written were {entry.bytes:,}")
    return found


def damaged(directory: Path, manifest: Manifest, names: Iterable[str] | None = None) -> list[str]:
    """Which of the files (default: all) are not as they were written; reads them whole."""
    found = []
    for name in manifest.files if names is None else names:
        mark(f"checksum of {name}")
        try:
            actual = measure(directory / name)
        except OSError as error:
            found.append(f"{directory / name} cannot be read: {error.strerror}")
            continue
        if actual != manifest.files[name]:
            found.append(f"{directory / name} is damaged: its checksum differs from the one written with it ({actual.bytes:,} bytes)")
    return found


def write_durably(path: Path, data: bytes) -> None:
    """On the disk when it returns."""
    with path.open("wb") as f:
        f.write(data)
        f.flush()
        os.fsync(f.fileno())


def sync_directory(path: Path) -> None:
    """Names made or changed in the directory are on the disk when it returns."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _digest(content: dict[str, Any]) -> str:
    return f"{zlib.crc32(json.dumps(content, sort_keys=True).encode()):08x}"
