"""From the start of the process to the first generated token, part by part."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import psutil

from megaflow.monitor.progress import mark


class Startup:
    """Made when a run's parts begin to be built. `rollout` is the backend; one without `startup_seconds` reports no engine."""

    def __init__(self) -> None:
        self.process_began = psutil.Process(os.getpid()).create_time()
        self.build_began = time.time()
        self.parts = {"imports": self.build_began - self.process_began}
        self.rollout: Any = None

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Measure a part of the building."""
        start = time.time()
        mark(name.replace("_", " "))
        yield
        self.parts[name] = time.time() - start

    def engine_started(self, rollout: Any) -> None:
        """Its host process was launched just now."""
        self.rollout, self.engine_began = rollout, time.time()

    def facts(self) -> dict[str, float]:
        """Seconds by part; engine_<part> within `engine`; first_token counts from the start of the process. For env.json."""
        ask = getattr(self.rollout, "startup_seconds", None)
        engine = ask() if ask is not None else {}
        found = dict(self.parts)
        if "total" in engine:
            found["engine"] = engine.pop("total")
        if "first_token" in engine:
            found["first_token"] = self.engine_began - self.process_began + engine.pop("first_token")
        return {name: round(seconds, 3) for name, seconds in {**found, **{f"engine_{n}": s for n, s in engine.items()}}.items()}

    def metrics(self) -> dict[str, float]:
        """time/startup_<part> for the large parts."""
        return {f"time/startup_{n}": s for n, s in self.facts().items() if n in ("imports", "actor", "engine", "first_token")}

    def text(self) -> str:
        """One line for a person."""
        facts = self.facts()
        parts = ", ".join(f"{name} {seconds:.1f}" for name, seconds in facts.items() if name != "first_token" and seconds >= 0.1)
        total = f"{facts['first_token']:.1f} s to the first token; " if "first_token" in facts else ""
        return f"start-up: {total}{parts} (engine beside actor)"
