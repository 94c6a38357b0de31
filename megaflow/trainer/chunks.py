"""A file that is made chunk by chunk and survives a kill at any moment: whole parts beside it, joined at the end.

    <output>.parts/settings.json  part_000000.jsonl ...     while it is being made
    <output>  <output>.json                                  when it is done: all lines in order; how they were made

A part is written under another name and renamed, so a part that exists is whole, and a chunk without one is made again.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from megaflow.monitor.metrics import replace_text
from megaflow.trainer.rundir import claim
from megaflow.types import ConfigError

Line = dict[str, Any]
AS_JSON = ("answer", "meta", "parts")  # columns of a parquet file whose type may differ from line to line


class ChunkedOutput:
    """Of one output file; `settings` (dotted key -> JSON value) are what decides its content. Rank 0 only."""

    def __init__(self, path: Path, settings: dict[str, Any]):
        """Raises ConfigError when the file is finished, is being made by another process, or was begun with other settings."""
        self.path, self.settings = path, settings
        self.folder = path.with_name(path.name + ".parts")
        if path.exists():
            if (self.folder / "joined").exists():  # killed between the last rename and the tidying up
                shutil.rmtree(self.folder)
            raise ConfigError(f"{path} is finished; delete it (rm {path}) or write to another file (generate.output=PATH)")
        self._lock = claim(self.folder)
        begun = self.folder / "settings.json"
        if begun.exists():
            self._compare(json.loads(begun.read_text()))
        replace_text(begun, json.dumps(settings, indent=1))

    def _compare(self, before: dict[str, Any]) -> None:
        now = json.loads(json.dumps(self.settings))
        different = [k for k in sorted(before | now) if before.get(k) != now.get(k)]
        if different:
            self._lock.close()
            rows = "\n".join(f"  {key}: {before.get(key)} -> {now.get(key)}" for key in different)
            raise ConfigError(
                f"{self.path} was begun with other settings:\n{rows}\n"
                f"Set them back, write to another file (generate.output=PATH), or start over (rm -r {self.folder})"
            )

    def done(self) -> set[int]:
        """Numbers of the chunks that are there."""
        return {int(p.stem.removeprefix("part_")) for p in self.folder.glob("part_*.jsonl")}

    def write(self, chunk: int, lines: Iterable[Line]) -> None:
        replace_text(self._part(chunk), "".join(json.dumps(line, ensure_ascii=False, default=str) + "\n" for line in lines))

    def _part(self, chunk: int) -> Path:
        return self.folder / f"part_{chunk:06d}.jsonl"

    def same_data(self, fingerprint: str) -> None:
        """Raises ConfigError when the prompts are not those of the parts that are there."""
        known = self.folder / "data_fingerprint"
        if known.exists() and known.read_text() != fingerprint:
            raise ConfigError(
                f"{self.path}: the prompts have changed since it was begun (the files of data.train, or the model's tokenizer). "
                f"Restore them, write to another file (generate.output=PATH), or start over (rm -r {self.folder})"
            )
        replace_text(known, fingerprint)

    def finish(self, chunks: int, summary: dict[str, Any], keep: Callable[[Line], bool] = lambda line: True) -> int:
        """Join those lines of the parts that `keep` says, in order; returns their number. One part is in memory at a time."""
        fresh = self.path.with_name(f".{self.path.name}.new")
        parts = ([line for line in map(json.loads, self._part(c).open()) if keep(line)] for c in range(chunks))
        number = (_write_parquet if self.path.suffix == ".parquet" else _write_jsonl)(fresh, parts)
        summary = summary | {"lines": number, "settings": self.settings}
        replace_text(self.path.with_name(self.path.name + ".json"), json.dumps(summary, indent=1) + "\n")
        (self.folder / "joined").touch()
        os.replace(fresh, self.path)
        self._lock.close()
        shutil.rmtree(self.folder)
        return number


def _write_jsonl(path: Path, parts: Iterable[list[Line]]) -> int:
    number = 0
    with path.open("w") as file:
        for lines in parts:
            number += len(lines)
            file.writelines(json.dumps(line, ensure_ascii=False) + "\n" for line in lines)
        file.flush()
        os.fsync(file.fileno())
    return number


def _write_parquet(path: Path, parts: Iterable[list[Line]]) -> int:
    """Columns of mixed type become `<name>_json`, which the reader of stored samples knows."""
    import pyarrow
    import pyarrow.parquet

    number, writer = 0, None
    with path.open("wb") as file:
        for lines in parts:
            if not lines:
                continue
            number += len(lines)
            flat = [{k: v for k, v in x.items() if k not in AS_JSON} | {f"{k}_json": json.dumps(x.get(k)) for k in AS_JSON} for x in lines]
            table = pyarrow.Table.from_pylist(flat, None if writer is None else writer.schema)
            if writer is None:
                writer = pyarrow.parquet.ParquetWriter(file, table.schema)
            writer.write_table(table)
        if writer is None:  # not one line
            pyarrow.parquet.write_table(pyarrow.table({"prompt": pyarrow.array([], pyarrow.string())}), file)
        else:
            writer.close()
        file.flush()
        os.fsync(file.fileno())
    return number
