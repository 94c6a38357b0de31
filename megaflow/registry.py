"""Name -> lazy factory. Listing or checking names imports nothing; a user's own function needs no registration.

    LOSSES = Registry("loss")
    LOSSES.register("ppo_clip", "megaflow.algo.losses:ppo_clip")     # imported at the first get
    LOSSES.get("ppo_clip"), LOSSES.get("mypackage.losses:mine"), LOSSES.get("rewards/mine.py:score")
"""

from __future__ import annotations

import difflib
import hashlib
import importlib
import importlib.util
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from types import ModuleType
from typing import Any

from megaflow.types import ConfigError


def nearest(name: str, known: Iterable[str]) -> str:
    """` (did you mean 'x'?)` for the known name closest to a misspelt one, or nothing."""
    match = difflib.get_close_matches(name, list(known), n=1, cutoff=0.6)
    return f" (did you mean {match[0]!r}?)" if match else ""


class Registry:
    """What can be chosen by name for one config key; `kind` is the word that errors use, e.g. "loss"."""

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self._entries: dict[str, str | Callable[..., Any]] = {}

    def register(self, name: str, target: str | None = None) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
        """`register(name, "package.module:attr")` is imported at the first get; `@register(name)` decorates a function or class."""
        assert name not in self._entries, f"{self.kind} {name!r} is registered twice"

        def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
            self._entries[name] = function
            return function

        if target is not None:
            assert ":" in target, f"{target!r} is not package.module:attr"
            self._entries[name] = target
        return decorate

    def names(self) -> list[str]:
        return sorted(self._entries)

    def validate(self, name: str) -> None:
        """Without importing anything: the name is known, or is `package.module:attr`, or `file.py:attr` of a file that exists.

        Raises ConfigError that lists the names.
        """
        if name in self._entries:
            return
        place, colon, attribute = name.rpartition(":")
        if not colon:
            raise ConfigError(f"there is no {self.kind} {name!r}{nearest(name, self._entries)}; {self._choices()}")
        if not place or not attribute.replace(".", "_").isidentifier():
            raise ConfigError(f"{name!r} is neither package.module:function nor file.py:function; {self._choices()}")
        if place.endswith(".py") and not Path(place).is_file():
            raise ConfigError(f"{self.kind} {name!r}: no file {place} (looked in {Path.cwd()})")

    def get(self, name: str) -> Any:
        """The registered object, or the one that `package.module:attr` or `path/to/file.py:attr` names.

        Raises ConfigError if there is none or if it cannot be imported (of a built-in too: an optional dependency may be missing).
        """
        self.validate(name)
        entry = self._entries.get(name, name)
        return load(entry, f"{self.kind} {name!r}") if isinstance(entry, str) else entry

    def _choices(self) -> str:
        return f"known are {', '.join(self.names()) or 'none'}, or give package.module:function or file.py:function"


def load(target: str, what: str) -> Any:
    """Import `package.module:attr` or `file.py:attr`. Raises ConfigError that begins with `what` and names file or module and reason."""
    place, _, attribute = target.rpartition(":")
    module = _load_file(place, what) if place.endswith(".py") else _load_module(place, what)
    found: Any = module
    for part in attribute.split("."):
        if not hasattr(found, part):
            public = [name for name in vars(found) if not name.startswith("_")]
            raise ConfigError(f"{what}: {place} has no {part!r}{nearest(part, public)}")
        found = getattr(found, part)
    return found


def _load_module(name: str, what: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except Exception as error:  # whatever the user's module raises while it is imported
        raise ConfigError(f"{what}: cannot import {name}: {_reason(error)}") from error


def _load_file(path: str, what: str) -> ModuleType:
    file = Path(path).resolve()
    if not file.is_file():
        raise ConfigError(f"{what}: no file {path} (looked in {Path.cwd()})")
    # Two rewards/score.py of different folders must not collide, and worker processes must find the same name when unpickling.
    name = f"megaflow_user_{file.stem}_{hashlib.sha256(str(file).encode()).hexdigest()[:8]}"
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses and pickle look the module up while it is still loading
    try:
        spec.loader.exec_module(module)
    except Exception as error:  # whatever the user's file raises while it is imported
        del sys.modules[name]
        raise ConfigError(f"{what}: cannot import {path}: {_reason(error)}") from error
    return module


def _reason(error: Exception) -> str:
    """One line: the error, and the line of the user's file where it arose."""
    if isinstance(error, SyntaxError):
        return f"line {error.lineno}: {type(error).__name__}: {error.msg}"
    frames = []
    trace = error.__traceback__
    while trace is not None:
        frames.append((trace.tb_frame.f_code.co_filename, trace.tb_lineno))
        trace = trace.tb_next
    user = [line for line in frames if "importlib" not in line[0] and line[0] != __file__]
    where = f"line {user[-1][1]} of {Path(user[-1][0]).name}: " if user else ""
    return f"{where}{type(error).__name__}: {error}"
