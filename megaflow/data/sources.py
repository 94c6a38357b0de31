"""Where prompts come from: jsonl, parquet, or a procedural task of reasoning-gym. Each gives the same records."""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megaflow.config.schema import SourceConfig
from megaflow.types import ConfigError, PreflightError

PROCEDURAL = "reasoning-gym:"
Row = tuple[int, dict[str, Any]]  # number of the line, from 1; its columns


@dataclass(frozen=True)
class Record:
    """One line of a source, not yet in tokens."""

    id: str  # "<source's name>:<line>"
    where: str  # "<file>:<line>", for messages
    prompt: Any
    answer: Any
    has_answer: bool  # False: the line lacks the key; an answer that is null counts as given
    meta: dict[str, Any]


def source_name(source: SourceConfig) -> str:
    """The name in metrics and in prompts' ids."""
    return source.name or (source.path.removeprefix(PROCEDURAL) if _is_procedural(source) else Path(source.path).stem)


def read_source(source: SourceConfig, label: str, prompt_key: str, answer_key: str) -> Iterator[Record]:
    """All records of a source, in the file's order. `label` is the source's place in the configuration, e.g. "data.train[0]".

    The first line that cannot be read or lacks `prompt_key` raises PreflightError with its file:line.
    """
    if _is_procedural(source):  # its columns are reasoning-gym's, whatever the files beside it call theirs
        prompt_key, answer_key = "question", "answer"
    name = source_name(source)
    for line, row in _rows(source, label):
        where = f"{source.path}:{line}"
        if prompt_key not in row:
            raise PreflightError(_missing_key(where, prompt_key, row))
        meta = {key: value for key, value in row.items() if key not in (prompt_key, answer_key)}
        yield Record(f"{name}:{line}", where, row[prompt_key], row.get(answer_key), answer_key in row, meta)


def check_answers(records: Iterable[Record], answer_key: str) -> Iterator[Record]:
    """Passes records on; raises PreflightError at the first that has an answer where the one before had none, or the other way round."""
    before: Record | None = None
    for record in records:
        if before is not None and record.has_answer != before.has_answer:
            without, having = (before, record) if record.has_answer else (record, before)
            raise PreflightError(
                f"{without.where}: no key {answer_key!r} (data.answer_key), which {having.where} has; "
                "give every line an answer (null will do), or none"
            )
        before = record
        yield record


def _is_procedural(source: SourceConfig) -> bool:
    return source.path.startswith(PROCEDURAL)


def _missing_key(where: str, prompt_key: str, row: dict[str, Any]) -> str:
    near = difflib.get_close_matches(prompt_key, list(row), n=1)
    hint = f"; did you mean {near[0]!r}?" if near else ""
    return f"{where}: no key {prompt_key!r} (data.prompt_key); its keys are {', '.join(map(str, row)) or 'none'}{hint}"


def _rows(source: SourceConfig, label: str) -> Iterator[Row]:
    if _is_procedural(source):
        return _procedural_rows(source, label)
    path = Path(source.path)
    if path.suffix not in (".jsonl", ".parquet"):
        raise ConfigError(f"{label}.path={source.path!r}: neither a .jsonl or .parquet file nor {PROCEDURAL}<task>")
    if not path.is_file():
        raise PreflightError(f"{label}.path={source.path!r}: no such file (seen from {Path.cwd()})")
    return _jsonl_rows(path, source.limit) if path.suffix == ".jsonl" else _parquet_rows(path, source.limit)


def _jsonl_rows(path: Path, limit: int) -> Iterator[Row]:
    read = 0
    with path.open("rb") as lines:  # bytes, so that a line in a wrong encoding is named like any other bad line
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            yield number, _parse_line(line, f"{path}:{number}")
            read += 1
            if read == limit:
                return


def _parse_line(line: bytes, where: str) -> dict[str, Any]:
    try:
        row = json.loads(line.decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        raise PreflightError(f"{where}: not UTF-8 (byte {error.start + 1} of the line)") from error
    except json.JSONDecodeError as error:
        raise PreflightError(f"{where}: not JSON: {error.msg} at column {error.colno}") from error
    if not isinstance(row, dict):
        raise PreflightError(f"{where}: a {type(row).__name__}, where an object with named columns is expected")
    return row


def _parquet_rows(path: Path, limit: int) -> Iterator[Row]:
    try:
        import pyarrow.parquet as parquet
    except ImportError as error:
        raise ConfigError(f"{path}: reading parquet needs pyarrow: pip install pyarrow") from error
    from pyarrow.lib import ArrowException

    try:
        with parquet.ParquetFile(path) as file:
            rows = (row for batch in file.iter_batches(batch_size=1024) for row in batch.to_pylist())
            for number, row in enumerate(rows, start=1):
                yield number, row
                if number == limit:
                    return
    except ArrowException as error:
        raise PreflightError(f"{path}: not a readable parquet file: {error}") from error


def _procedural_rows(source: SourceConfig, label: str) -> Iterator[Row]:
    try:
        import reasoning_gym
        from reasoning_gym.factory import DATASETS
    except ImportError as error:
        raise ConfigError(f"{label}.path={source.path!r}: needs the package reasoning-gym: pip install reasoning-gym") from error
    task = source.path.removeprefix(PROCEDURAL)
    if task not in DATASETS:
        near = difflib.get_close_matches(task, list(DATASETS), n=3) or sorted(DATASETS)
        raise ConfigError(f"{label}.path={source.path!r}: reasoning-gym has no task {task!r}; nearest: {', '.join(near)}")
    if source.limit < 1:
        raise ConfigError(f"{label}.limit=0: a procedural task has no end; say how many prompts to make")
    try:
        made = reasoning_gym.create_dataset(task, size=source.limit, seed=source.seed, **source.options)
    except (TypeError, ValueError, AssertionError) as error:
        settings = ", ".join(sorted(set(DATASETS[task][1].__dataclass_fields__) - {"seed", "size"}))
        raise ConfigError(f"{label}.options={source.options}: {task} refuses them: {error}; its settings are {settings}") from error
    for number in range(source.limit):
        yield number + 1, made[number]
