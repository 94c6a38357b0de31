"""The checkpoints of a run side by side: which is the newest whole one, how a new one appears and an old one goes. One rank only.

step_000012/        a checkpoint
step_000013.part/   one being written, or left by a kill
step_000010.trash/  one being deleted, or left by a kill
"""

from __future__ import annotations

import logging
import math
import os
import re
import shutil
from dataclasses import dataclass
from pathlib import Path

from megaflow.checkpoint import manifest

log = logging.getLogger(__name__)

_NAME = re.compile(r"step_(\d+)")


def name_of(step: int) -> str:
    return f"step_{step:06d}"


def find(path: Path) -> tuple[int, Path] | None:
    """(step, path) of the newest whole checkpoint in a directory, or of the checkpoint that the path itself is; None: there is none.

    Cheap: it looks at names and sizes. `load` verifies the contents.
    """
    path = Path(path)
    if (path / manifest.NAME).is_file():
        step = _step_if_whole(path)
        return None if step is None else (step, path)
    for _, candidate in _candidates(path, ""):
        if (step := _step_if_whole(candidate)) is not None:
            return step, candidate
    # A kill between the two renames of `publish`, where a step is saved for the second time.
    for _, candidate in _candidates(path, ".trash"):
        if (step := _step_if_whole(candidate)) is not None:
            return step, candidate
    return None


def previous(path: Path) -> Path | None:
    """The newest checkpoint beside `path` of an earlier step whose every file has the right checksum."""
    own = _NAME.match(path.name)
    for step, candidate in _candidates(path.parent, ""):
        is_earlier = own is not None and step < int(own[1])
        if is_earlier and _step_if_whole(candidate) is not None and not manifest.damaged(candidate, manifest.read(candidate)):
            return candidate
    return None


def begin(part: Path) -> None:
    """An empty directory to write into; what killed runs left half-written goes."""
    part.parent.mkdir(exist_ok=True)  # not its parents: where they are gone, so is the disk that they were on
    for stale in part.parent.glob("step_*.part"):
        remove(stale)
    part.mkdir()


def publish(part: Path, step: int) -> Path:
    """Give a finished checkpoint its name, in one rename."""
    final = part.parent / name_of(step)
    if final.exists():  # the same step was saved before, e.g. by a run that was then resumed from an earlier one
        _to_trash(final)
    manifest.sync_directory(part)
    part.rename(final)
    manifest.sync_directory(final.parent)
    return final


@dataclass(frozen=True)
class Retention:
    """The `keep_last` newest stay, and beside them the `keep_best` with the best score by `metric`. mode: max or min is best."""

    keep_last: int
    keep_best: int = 0
    metric: str = ""
    mode: str = "max"


@dataclass(frozen=True)
class Best:
    """The checkpoint with the best score."""

    step: int
    path: Path
    metric: str
    value: float


def rotate(directory: Path, step: int, retention: Retention) -> Best | None:
    """Keep what `retention` says of those up to `step`, the one just saved. Later ones, of an abandoned branch, are left alone.

    Returns the best that is kept; None: none has a score, or none is wanted.
    """
    whole = [path for s, path in _candidates(directory, "") if s <= step and _step_if_whole(path) is not None]
    ranked = _ranked(whole, retention) if retention.keep_best else []
    kept = {*whole[: retention.keep_last], *(best.path for best in ranked[: retention.keep_best])}
    for old in whole:
        if old not in kept:
            _to_trash(old)
    for leftover in directory.glob("step_*.trash"):
        remove(leftover)
    return ranked[0] if ranked else None


def _ranked(whole: list[Path], retention: Retention) -> list[Best]:
    """Best first; of equals the earlier. A checkpoint whose score is missing or not finite is not among them."""
    sign = -1 if retention.mode == "max" else 1
    contents = [(path, manifest.read(path)) for path in whole]
    scored = [Best(c.step, path, retention.metric, c.scores[retention.metric]) for path, c in contents if retention.metric in c.scores]
    return sorted((best for best in scored if math.isfinite(best.value)), key=lambda best: (sign * best.value, best.step))


def remove(path: Path) -> None:
    """Delete a directory; what cannot be deleted costs space, not the run."""
    shutil.rmtree(path, onexc=lambda _, name, error: log.warning("cannot delete %s: %s", name, error))


def _to_trash(path: Path) -> None:
    """A name of its own first, so that a kill in the middle of deletion leaves nothing that looks like a checkpoint."""
    trash = path.with_name(f"{path.name}.trash")
    if trash.exists():
        remove(trash)
    os.rename(path, trash)


def _candidates(directory: Path, suffix: str) -> list[tuple[int, Path]]:
    """Newest first."""
    if not directory.is_dir():
        return []
    named = ((_NAME.fullmatch(p.name.removesuffix(suffix)), p) for p in directory.iterdir() if p.name.endswith(suffix) and p.is_dir())
    return sorted(((int(match[1]), p) for match, p in named if match), reverse=True)


def _step_if_whole(path: Path) -> int | None:
    try:
        content = manifest.read(path)
    except FileNotFoundError:
        return None
    except manifest.BadManifest as error:
        log.warning("%s", error)
        return None
    lacking = manifest.missing(path, content)
    for text in lacking:
        log.warning("%s", text)
    return None if lacking else content.step
