"""Step numbers as a person writes them: "5-6", "5,8-9"."""

from __future__ import annotations

import re

from megaflow.types import ConfigError


def parse_steps(text: str) -> set[int]:
    """The steps meant; none for empty text. Raises ConfigError for anything else than numbers and ranges from 1 on."""
    found: set[int] = set()
    for part in filter(None, (p.strip() for p in text.split(","))):
        match = re.fullmatch(r"(\d+)(?:\s*-\s*(\d+))?", part)
        first, last = (int(match[1]), int(match[2] or match[1])) if match else (0, 0)
        if not 1 <= first <= last:
            raise ConfigError(f"{text!r} are no steps; write e.g. 5, 5-6 or 5,8-9, from 1 on")
        found |= set(range(first, last + 1))
    return found
