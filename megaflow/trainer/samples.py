"""samples/step_N.jsonl: what the policy wrote, and what it got for it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from megaflow.monitor.metrics import replace_text
from megaflow.types import Sample


def sample_line(sample: Sample) -> dict[str, Any]:
    """One sample as JSON. A token-level advantage is given as its mean."""
    advantage = sample.advantage
    return {
        "id": sample.prompt.id,
        "group": sample.group,
        "index": sample.index,
        "prompt": sample.prompt.text,
        "response": sample.text,
        "answer": sample.prompt.answer,
        "reward": float(sample.reward),
        "parts": sample.reward_parts,
        "advantage": float(advantage) if isinstance(advantage, float | int) else float(advantage.mean()),
        "prompt_tokens": len(sample.prompt.tokens),
        "response_tokens": sample.num_response,
        "finish": sample.finish,
        "version": sample.version,
    }


def write_samples(directory: Path, step: int, samples: Sequence[Sample], limit: int) -> Path:
    """The first `limit` samples (-1: all), group by group, so that whole groups can be compared."""
    ordered = sorted(samples, key=lambda s: (s.group, s.index))
    chosen = ordered if limit < 0 else ordered[:limit]
    path = directory / f"step_{step}.jsonl"
    replace_text(path, "".join(json.dumps(sample_line(s), ensure_ascii=False, default=str) + "\n" for s in chosen))
    return path
