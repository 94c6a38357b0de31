"""What runs inside a reward worker process. Imports nothing heavy itself: a worker starts in a fraction of a second."""

from __future__ import annotations

import ctypes
import inspect
import math
import numbers
import os
import pickle
import signal
import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any, Literal

from megaflow.registry import nearest
from megaflow.rewards import REWARDS
from megaflow.types import ConfigError, Prompt

PR_SET_PDEATHSIG = 1  # <linux/prctl.h>
MAX_TRACEBACK = 4000  # characters

Failure = Literal["", "error", "timeout", "died"]
Spec = list[tuple[str, str, dict[str, Any]]]  # part, name and options of each function


@dataclass(frozen=True)
class RewardFunction:
    part: str  # name within reward_parts
    name: str  # as configured
    call: Callable[..., Any]
    options: dict[str, Any]


@dataclass(frozen=True)
class Outcome:
    """Of one sample: the parts, or why there are none."""

    parts: dict[str, float]
    failure: Failure = ""
    detail: str = ""  # of the failure, for a person
    answer: str | None = None  # what the response answers, when it was asked for and the first function can tell


def serve(pipe_fd: int, parent: int) -> None:
    """The life of a worker: load the functions that the first message names, say whether that went well, then answer chunks of items."""
    _die_with(parent)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    pipe = Connection(pipe_fd)
    functions = load_functions(pipe.recv())
    if isinstance(functions, str):
        pipe.send((functions, False))
        return
    pipe.send(("", bool(functions) and hasattr(functions[0].call, "find_answer")))
    while True:
        try:
            chunk = pipe.recv()
        except EOFError:  # the pool was closed
            return
        for number, item in chunk:
            pipe.send((number, evaluate(functions, item)))


def evaluate(functions: list[RewardFunction], item: bytes) -> Outcome:
    """All functions on one sample. Whatever they do wrong, short of ending the process, comes back as a failure."""
    parts: dict[str, float] = {}
    where = "its columns"
    try:
        response, prompt, with_answer = pickle.loads(item)
        for function in functions:
            where = f"reward {function.name} on prompt {prompt.id}"
            value = function.call(response, prompt.answer, prompt, **function.options)
            number = value.item() if hasattr(value, "item") else value  # a scalar of numpy or torch
            if not isinstance(number, numbers.Real) or not math.isfinite(number):
                return Outcome({}, "error", f"{where} returned {value!r:.200} ({type(value).__name__}), not a finite number")
            parts[function.part] = float(number)
        answer = answer_of(functions[0], response, prompt) if with_answer and functions else None
    except BaseException:  # SystemExit too: a function may not end its worker
        return Outcome({}, "error", f"{where}:\n{traceback.format_exc()[-MAX_TRACEBACK:]}")
    return Outcome(parts, answer=answer)


def answer_of(function: RewardFunction, response: str, prompt: Prompt) -> str | None:
    """What the response answers, in a spelling that equal answers share: by the attribute `find_answer` of the function, if it has one."""
    find = getattr(function.call, "find_answer", None)
    answer = find(response, prompt.answer, prompt) if find else None
    return None if answer is None else str(answer)


def load_functions(spec: Spec) -> list[RewardFunction] | str:
    """The functions, or why they cannot be used."""
    try:
        return [RewardFunction(part, name, _usable(name, options), options) for part, name, options in spec]
    except ConfigError as error:
        return str(error)
    except BaseException:  # the user's file may do anything while it is imported, sys.exit included
        return f"reward functions do not load:\n{traceback.format_exc()[-MAX_TRACEBACK:]}"


def _usable(name: str, options: dict[str, Any]) -> Callable[..., Any]:
    """The function, once it is known to take (response, answer, prompt, **options)."""
    function = REWARDS.get(name)
    if not callable(function):
        raise ConfigError(f"reward {name!r} is a {type(function).__name__}, not a function")
    signature = inspect.signature(function)
    names = list(signature.parameters)[3:]
    for option in options:
        if option not in names and not any(p.kind is p.VAR_KEYWORD for p in signature.parameters.values()):
            raise ConfigError(f"reward {name!r} has no option {option!r}{nearest(option, names)}; it takes {', '.join(names) or 'none'}")
    try:
        signature.bind("", None, None, **options)
    except TypeError as error:
        called = "fn(response, answer, prompt, **options)"
        raise ConfigError(f"reward {name!r} cannot be called as {called}: {error}; its signature is {signature}") from error
    return function


def _die_with(parent: int) -> None:
    """No orphans: the kernel kills this process when the one that started it is gone, even by kill -9 and even within an endless loop."""
    if sys.platform != "linux":
        return  # elsewhere a worker notices at the end of the pipe, when it next asks for work
    if ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG)")
    if os.getppid() != parent:  # it died before the call above
        os._exit(1)
