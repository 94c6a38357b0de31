"""Defaults < base files < file < `a.b=c` arguments, checked against the schema; every value remembers where it was set.

Merging and type conversion are OmegaConf's (structured config); it has no line numbers, so each assignment carries its own.
All mistakes are collected and raised together.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import yaml

from megaflow.config.merging import DEFAULT, Merge
from megaflow.config.nodes import Assignment, Source
from megaflow.config.schema import Config
from megaflow.registry import nearest
from megaflow.types import ConfigError


@dataclass(frozen=True)
class Loaded:
    """A configuration and where each of its values was set."""

    config: Config
    path: str | None = None
    origin: dict[str, str] = field(default_factory=dict)  # dotted key -> "yaml/x.yaml:14" or "argument a.b=c"

    def where(self, key: str) -> str:
        """Where the dotted key was set: "yaml/x.yaml:14", "argument a.b=c" or "default"."""
        return self.origin.get(key, DEFAULT)

    def blame(self, *keys: str) -> str:
        """The places that set these keys, for an error about them together; if none is set, where the first could have been."""
        places = list(dict.fromkeys(self.origin[key] for key in keys if key in self.origin))
        return " and ".join(places) or self._around(keys[0])

    def _around(self, key: str) -> str:
        """The place of the innermost section or list around a key, or the file."""
        while "." in key:
            key = key.rpartition(".")[0]
            if key in self.origin:
                return self.origin[key]
        return self.path or "without --config"


def load(path: str | None, overrides: list[str]) -> Loaded:
    """Read a file (None: defaults alone) with its bases, then the arguments.

    Raises ConfigError with one line for each mistake: place, value, what is allowed.
    """
    errors: list[str] = []
    merge = Merge(errors)
    if path is not None:
        for assignment in _read_file(path, errors, ()):
            merge.assign(assignment)
    for text in overrides:
        merge.override(text)
    config = merge.finish()
    if errors or config is None:
        raise ConfigError("\n".join(dict.fromkeys(errors)))
    return Loaded(config, path, merge.origin)


def _read_file(path: str, errors: list[str], within: tuple[str, ...]) -> Iterator[Assignment]:
    """The assignments of a file's bases, in their order, then its own. `within`: the files that lead here, to find cycles."""
    source = Source(path, errors, has_lines=True)
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not UTF-8 text"
        errors.append(f"{path}: cannot be read: {reason}{_similar_files(path)}")
        return
    root = source.parse(text)
    if root is None:
        return
    if not isinstance(root, yaml.MappingNode):
        errors.append(f"{path}: must be sections such as `model:` with keys below them")
        return
    bases = [value_node for key_node, value_node in root.value if key_node.value == "base"]
    for node in bases:
        for base in _base_paths(source, path, node):
            yield from _inherit(base, source.where(node), errors, (*within, path))
    own = yaml.MappingNode(root.tag, [pair for pair in root.value if pair[1] not in bases], root.start_mark)
    yield from source.walk("", Config, own, path)


def _base_paths(source: Source, path: str, node: yaml.Node) -> list[str]:
    """Of `base: file` or `base: [file, ...]`, relative to the file that says so."""
    entries = node.value if isinstance(node, yaml.SequenceNode) else [node]
    if any(not isinstance(each, yaml.ScalarNode) or not each.value for each in entries):
        source.errors.append(f"{source.where(node)}: base must be a file or a list of files, relative to this one")
        return []
    return [os.path.normpath(os.path.join(os.path.dirname(path), each.value)) for each in entries]


def _inherit(base: str, where: str, errors: list[str], within: tuple[str, ...]) -> Iterator[Assignment]:
    chain = [os.path.realpath(each) for each in within]
    if os.path.realpath(base) in chain:
        loop = [*within[chain.index(os.path.realpath(base)) :], base]
        errors.append(f"{where}: base files inherit each other in a circle: {' -> '.join(loop)}")
    elif not os.path.isfile(base):
        errors.append(f"{where}: base: no file {base}{_similar_files(base)}")
    else:
        yield from _read_file(base, errors, within)


def _similar_files(path: str) -> str:
    folder = os.path.dirname(path) or "."
    if os.path.exists(path) or not os.path.isdir(folder):
        return ""
    return nearest(os.path.basename(path), [name for name in os.listdir(folder) if name.endswith((".yaml", ".yml"))])
