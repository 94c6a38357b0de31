"""A configuration as YAML text."""

from __future__ import annotations

import dataclasses
from typing import Any

from megaflow.config.loading import Loaded
from megaflow.config.nodes import flow
from megaflow.config.schema import Config


def as_yaml(loaded_or_config: Loaded | Config) -> str:
    """The whole resolved configuration as YAML that `load` reads back; of a Loaded, with the origin of each value as a comment."""
    loaded = loaded_or_config if isinstance(loaded_or_config, Loaded) else Loaded(loaded_or_config)
    lines: list[str] = []
    for section in dataclasses.fields(loaded.config):
        lines.append(f"{section.name}:")
        lines += _yaml_lines(loaded, getattr(loaded.config, section.name), section.name, "  ")
    return "\n".join(lines) + "\n"


def _yaml_lines(loaded: Loaded, section: Any, prefix: str, indent: str) -> list[str]:
    lines: list[str] = []
    for name, value in ((each.name, getattr(section, each.name)) for each in dataclasses.fields(section)):
        key = f"{prefix}.{name}"
        if dataclasses.is_dataclass(value):
            lines += [f"{indent}{name}:", *_yaml_lines(loaded, value, key, indent + "  ")]
            continue
        plain = value
        if isinstance(value, list):
            plain = [dataclasses.asdict(each) if dataclasses.is_dataclass(each) else each for each in value]
        note = f"  # {loaded.origin[key]}" if key in loaded.origin else ""
        lines.append(f"{indent}{name}: {flow(_escape(plain))}{note}")
    return lines


def _escape(value: Any) -> Any:
    """Write what looks like an interpolation so that it is read back as text."""
    if isinstance(value, str):
        return value.replace("${", "\\${")
    if isinstance(value, list):
        return [_escape(each) for each in value]
    return {name: _escape(each) for name, each in value.items()} if isinstance(value, dict) else value
