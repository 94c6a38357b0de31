"""Assignments, one after the other, into one structured config. Conversion and type checks are OmegaConf's."""

from __future__ import annotations

import dataclasses
import math
import typing
from collections.abc import Iterator
from typing import Any

import omegaconf
import yaml
from omegaconf import OmegaConf

from megaflow.config.nodes import Assignment, Source, describe, flow, types_of, unknown
from megaflow.config.schema import Config

DEFAULT = "default"
LONGEST_ARGUMENT = 80  # characters of an argument that a message repeats


class Merge:
    """Assignments, one after the other, into one structured config."""

    def __init__(self, errors: list[str]) -> None:
        self.errors = errors
        self.origin: dict[str, str] = {}
        self.node = OmegaConf.structured(Config)
        _thaw(self.node)

    def assign(self, assignment: Assignment) -> None:
        key, value = assignment.key, assignment.value
        if assignment.kind is not None:
            # OmegaConf takes 3 and "yes" for true: too lenient for a flag that someone may have put in the wrong place
            wrong_flag = assignment.kind is bool and not isinstance(value, bool) and "${" not in str(value)
            try:
                if wrong_flag:
                    raise omegaconf.errors.ValidationError
                OmegaConf.update(self.node, key, value, merge=not isinstance(value, dict))  # a mapping is replaced, not joined
            except omegaconf.errors.OmegaConfBaseException:
                self.errors.append(f"{assignment.where}: {key}={flow(value)} is not {describe(assignment.kind)}")
                return
            if isinstance(value, list):
                _thaw(OmegaConf.select(self.node, key))
                self.origin = {old: where for old, where in self.origin.items() if not old.startswith(f"{key}.")}
        self.origin[key] = assignment.where

    def override(self, text: str) -> None:
        """One `a.b=c` argument; c is YAML, list items are reached by number (data.train.0.path=x)."""
        where = f"argument {text}" if len(text) <= LONGEST_ARGUMENT else f"argument {text[:LONGEST_ARGUMENT]}..."
        key, equals, value = text.partition("=")
        if not equals or not key or key.strip() != key:
            self.errors.append(f"{where}: an override has the form section.key=value")
            return
        kind = self._kind_of(key, where)
        if kind is None:
            return
        source = Source(where, self.errors, has_lines=False)
        if kind is str and not value.startswith(("'", '"')):  # `data.system=Answer: yes or no` means its letters
            node: yaml.Node | None = yaml.ScalarNode("tag:yaml.org,2002:str", value)
        elif not value.strip():
            node = yaml.ScalarNode("tag:yaml.org,2002:null", "")
        else:
            node = source.parse(value)
        for assignment in source.walk(key, kind, node, where) if node is not None else ():
            self.assign(assignment)

    def _kind_of(self, key: str, where: str) -> Any:
        """The schema's type at a dotted key; None, and an error collected, if there is no such key."""
        kind: Any = Config
        walked: list[str] = []
        for part in key.split("."):
            here = ".".join(walked)
            walked.append(part)
            if dataclasses.is_dataclass(kind) and part in types_of(kind):
                kind = types_of(kind)[part]
            elif dataclasses.is_dataclass(kind):
                self.errors.append(f"{where}: {unknown('.'.join(walked), part, here, kind)}")
                return None
            elif typing.get_origin(kind) is list:
                count = len(OmegaConf.select(self.node, here))
                if not part.isdecimal() or int(part) >= count:
                    self.errors.append(f"{where}: {here} has {count} item(s), numbered from 0; to replace the list: {here}=[...]")
                    return None
                (kind,) = typing.get_args(kind)
            elif typing.get_origin(kind) is dict:
                self.errors.append(f"{where}: set {here} as a whole: {here}={{{part}: ...}}")
                return None
            else:
                self.errors.append(f"{where}: {here} is {describe(kind)} and has no key {part}")
                return None
        return kind

    def finish(self) -> Config | None:
        """Resolve ${...}, make the dataclasses and check the limits. None if anything was collected."""
        try:
            config = typing.cast(Config, OmegaConf.to_object(self.node))
        except omegaconf.errors.OmegaConfBaseException as error:
            key = str(error.full_key).replace("[", ".").replace("]", "")
            reason = str(error.msg).splitlines()[0]
            self.errors.append(f"{self.origin.get(key, DEFAULT)}: {key}: {reason} (a literal dollar-brace is written \\${{)")
            return None
        for key, number, limits in _numbers(config, ""):
            self._check_limits(key, number, limits)
        return None if self.errors else config

    def _check_limits(self, key: str, number: float, limits: dict[str, float]) -> None:
        tests = {"ge": number.__ge__, "gt": number.__gt__, "le": number.__le__, "lt": number.__lt__}
        signs = {"ge": ">=", "gt": ">", "le": "<=", "lt": "<"}
        place = f"{self.origin.get(key, DEFAULT)}: {key}={flow(number)}"
        if not math.isfinite(number):
            self.errors.append(f"{place} must be finite")
        elif not all(tests[name](type(number)(limit)) for name, limit in limits.items()):
            self.errors.append(f"{place} must be {' and '.join(f'{signs[name]} {limit}' for name, limit in limits.items())}")


def _numbers(section: Any, prefix: str) -> Iterator[tuple[str, float, dict[str, float]]]:
    """(dotted key, number, its limits) of every number in the configuration."""
    for each in dataclasses.fields(section):
        value, key = getattr(section, each.name), f"{prefix}{each.name}"
        if dataclasses.is_dataclass(value):
            yield from _numbers(value, f"{key}.")
        elif isinstance(value, list):
            for number, item in enumerate(value):
                if dataclasses.is_dataclass(item):
                    yield from _numbers(item, f"{key}.{number}.")
                elif type(item) is float:
                    yield key, item, {}
        elif type(value) in (int, float):
            yield key, value, {name: each.metadata[name] for name in ("ge", "gt", "le", "lt") if name in each.metadata}


def _thaw(node: Any) -> None:
    """Frozen dataclasses make read-only nodes; until the config is complete they must accept values."""
    OmegaConf.set_readonly(node, None)
    keys = range(len(node)) if isinstance(node, omegaconf.ListConfig) else list(node)
    for key in keys:
        child = node._get_node(key)
        if isinstance(child, (omegaconf.DictConfig, omegaconf.ListConfig)):
            _thaw(child)
