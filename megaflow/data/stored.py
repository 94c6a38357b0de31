"""Stored samples and pairs, as generate and runs write them or a user does: read, put into tokens, handed out in a repeatable order."""

from __future__ import annotations

import dataclasses
import json
import random
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from megaflow.config.schema import DataConfig, SourceConfig
from megaflow.data.prompts import render
from megaflow.data.sources import Record, read_source
from megaflow.types import PreflightError, Prompt, Sample

Unit = list[Sample]  # what belongs together: a prompt's samples (rl), one response (sft), chosen and rejected (dpo)
Objective = Literal["rl", "sft", "dpo"]


class StoredSamples:
    """All units of a file or folder, and which of them a step takes: each once an epoch, in an order made from seed and epoch alone.

    counts        lines read; retokenised, responses without stored tokens; no_logp, samples without log-probabilities
    temperatures  those that samples were drawn with, where it is known
    Raises PreflightError with file:line for what cannot be read.
    """

    def __init__(self, path: str, objective: Objective, config: DataConfig, tokenizer: Any, seed: int):
        self.seed, self.counts, self.temperatures = seed, Counter[str](), set[float]()
        self.units: list[Unit] = _READERS[objective](self, _records(path), config, tokenizer)
        if not self.units:
            raise PreflightError(f"data.rollouts={path}: there is not one line in it")

    def step(self, step: int, batch: int) -> list[Sample]:
        """The units of a step, from 1 on; `group` is the unit's number within the step, `index` the sample's within the unit."""
        return [
            dataclasses.replace(sample, group=group, index=index, sums=dict(sample.sums))
            for group, unit in enumerate(self._unit(i) for i in range((step - 1) * batch, step * batch))
            for index, sample in enumerate(unit)
        ]

    def keep(self, step: int, batch: int, rows: list[Sample], name: str) -> None:
        """Remember `sums[name]` of a step's samples (where they have it), so that the next epoch need not compute it again."""
        for row in rows:
            if name in row.sums:
                self._unit((step - 1) * batch + row.group)[row.index].sums[name] = row.sums[name]

    def epoch(self, step: int, batch: int) -> float:
        """Passes made over the units at the end of a step."""
        return step * batch / len(self.units)

    def _unit(self, position: int) -> Unit:
        epoch, place = divmod(position, len(self.units))
        return self.units[self._order(epoch)[place]]

    def _order(self, epoch: int) -> list[int]:
        if getattr(self, "_kept", (None, []))[0] != epoch:
            order = list(range(len(self.units)))
            random.Random(f"{self.seed}/{epoch}/stored").shuffle(order)
            self._kept = (epoch, order)
        return self._kept[1]

    # --- from lines to samples -----------------------------------------------------------------------------------

    def _sample(self, record: Record, prompt: Prompt, tokenizer: Any, side: str) -> Sample:
        """`side`: response, chosen or rejected. A response without stored tokens ends with the end token unless it was cut short."""
        row = record.meta
        finish = row.get("finish" if side == "response" else f"{side}_finish") or "stop"
        ids = row.get(f"{side}_ids")
        if ids is None:
            self.counts["retokenised"] += 1
            ids = tokenizer(row[side], add_special_tokens=False).input_ids + ([tokenizer.eos_token_id] if finish == "stop" else [])
        if not ids:
            raise PreflightError(f"{record.where}: its {side} is empty")
        return Sample(prompt, 0, 0, torch.tensor(ids), None, finish, int(row.get("version") or 0), text=row[side])

    def _prompt(self, record: Record, config: DataConfig, tokenizer: Any) -> Prompt:
        """With the stored tokens; else from the stored text, which had its template already, or from a question of the user's."""
        row = record.meta
        self.counts["lines"] += 1
        if row.get("temperature") is not None:
            self.temperatures.add(row["temperature"])
        is_ours = row.get("prompt_ids") is not None or "prompt_tokens" in row
        text = record.prompt if is_ours else render(record, tokenizer, config)
        ids = row.get("prompt_ids")
        if ids is None:
            ids = tokenizer(text, add_special_tokens=config.template == "plain").input_ids
        return Prompt(row.get("id") or record.id, list(ids), text, *_answer_and_meta(record))


def _read_rl(store: StoredSamples, records: Iterator[Record], config: DataConfig, tokenizer: Any) -> list[Unit]:
    groups: dict[Any, Unit] = {}
    prompts: dict[Any, Prompt] = {}
    for record in records:
        _need(record, "response", "rl")
        # one prompt of several steps of a run is several groups; so is a prompt that a step drew twice
        key = (record.where.rpartition(":")[0], record.meta.get("id") or record.id, record.meta.get("group"))
        prompt = prompts.setdefault(key, store._prompt(record, config, tokenizer))
        sample = store._sample(record, prompt, tokenizer, "response")
        sample.rollout_logp = _logp(record, sample)
        store.counts["no_logp"] += sample.rollout_logp is None
        groups.setdefault(key, []).append(sample)
    return list(groups.values())


def _read_sft(store: StoredSamples, records: Iterator[Record], config: DataConfig, tokenizer: Any) -> list[Unit]:
    return [
        [store._sample(record, store._prompt(record, config, tokenizer), tokenizer, "response")]
        for record in records
        if _need(record, "response", "sft")
    ]


def _read_dpo(store: StoredSamples, records: Iterator[Record], config: DataConfig, tokenizer: Any) -> list[Unit]:
    units = []
    for record in records:
        _need(record, "chosen", "dpo")
        _need(record, "rejected", "dpo")
        prompt = store._prompt(record, config, tokenizer)
        units.append([store._sample(record, prompt, tokenizer, side) for side in ("chosen", "rejected")])
    return units


_READERS = {"rl": _read_rl, "sft": _read_sft, "dpo": _read_dpo}


def _need(record: Record, column: str, objective: str) -> bool:
    if not isinstance(record.meta.get(column), str):
        kind = "a pair" if "chosen" in record.meta else "a sample" if "response" in record.meta else "neither a sample nor a pair"
        raise PreflightError(
            f"{record.where}: offline.objective={objective} needs a text `{column}` in each line, and this is {kind}; "
            "dpo learns from pairs (generate.kind=pairs), rl and sft from samples"
        )
    return True


def _logp(record: Record, sample: Sample) -> Tensor | None:
    values = record.meta.get("rollout_logp")
    if values is None:
        return None
    if len(values) != sample.num_response:
        raise PreflightError(f"{record.where}: {len(values)} log-probabilities for {sample.num_response} response tokens")
    return torch.tensor(values, dtype=torch.float32)


def _answer_and_meta(record: Record) -> tuple[Any, dict[str, Any]]:
    """As the reward functions get them; a parquet file has them as JSON. A user's own line is its own meta."""
    row = record.meta
    answer = json.loads(row["answer_json"]) if "answer_json" in row else record.answer
    meta = json.loads(row["meta_json"]) if "meta_json" in row else row.get("meta")
    is_ours = "prompt_ids" in row or "prompt_tokens" in row
    return answer, meta or ({} if is_ours else row)


def _records(path: str) -> Iterator[Record]:
    for file in stored_files(path):
        yield from read_source(SourceConfig(path=str(file)), "data.rollouts", "prompt", "answer")


def stored_files(path: str) -> list[Path]:
    """The file itself, or a folder's, by number. Raises PreflightError when there is none."""
    place = Path(path)
    files = [p for p in place.iterdir() if p.suffix in (".jsonl", ".parquet")] if place.is_dir() else [place]
    steps = [p for p in files if p.stem.startswith("step_")]  # of a run's samples, without those of its evaluations
    if not files or not all(p.is_file() for p in files):
        raise PreflightError(f"data.rollouts={path}: no such file, or a folder without .jsonl or .parquet files (seen from {Path.cwd()})")
    return sorted(steps or files, key=lambda p: (len(p.stem), p.stem))
