"""The last step's metrics over HTTP, in Prometheus' text format, while the run goes on (monitor.prometheus_port). On rank 0 only.

Names: reward/mean is megaflow_reward_mean; what stands in <...> in the list of metrics becomes a label, so eval/<set>/accuracy is
megaflow_eval_accuracy{set="..."}. Seconds of phases are megaflow_phase_seconds{phase="..."}. Every sample has the label `run`.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from megaflow.config.schema import Config
from megaflow.monitor.metrics import METRICS, template
from megaflow.types import ConfigError

PER_STEP = (  # counts of one step: also summed, as counters from the start of the process on
    *("reward/failed", "reward/timeout", "rollout/tokens", "batch/tokens", "sync/bytes", "sync/link_bytes", "device/energy_j"),
    *("dynamic/groups_generated", "dynamic/groups_dropped", "train/optimizer_steps", "train/skipped"),
    *("critic/optimizer_steps", "critic/skipped", "guard/fired", "time/step", "time/<phase>"),
)
CUMULATIVE = ("guard/actions", "guard/rollbacks")  # counted over the run already
NAMES = {"time/step": "step_seconds", "time/<phase>": "phase_seconds"}  # Prometheus wants the unit in the name
STATES = ("running", "done", "stopped", "config", "preflight", "diverged", "lost", "stalled", "crashed")


def family(name: str) -> tuple[str, str, dict[str, str]]:
    """(the entry of METRICS, its name for Prometheus without prefix, labels) of a metric."""
    entry, labels = template(name) or (name, {})
    bare = re.sub(r"_?<\w+>", "", entry)  # names may hold letters, digits and _ only
    return entry, NAMES.get(entry) or re.sub(r"[^a-zA-Z0-9]+", "_", bare).strip("_"), labels


class Exporter:
    """An HTTP server in a thread. `.log(step, metrics)` changes what it answers, `.close()` ends it; it does not outlive the process."""

    def __init__(self, config: Config, read_state: Callable[[], str], steps_total: int):
        """read_state() is status.json's `state`. Raises ConfigError when the port cannot be had."""
        from prometheus_client import CollectorRegistry, start_http_server

        self._labels = {"run": config.run.name}
        self._info = {"project": config.monitor.project, "model": config.model.path, "advantage": config.algo.advantage}
        self._read_state, self._steps_total = read_state, steps_total
        # step, when, values; replaced as a whole, for the server's thread reads it
        self._told: tuple[int, float, dict[str, float]] = (0, 0.0, {})
        self._sums: dict[str, float] = {}
        registry = CollectorRegistry(auto_describe=False)
        registry.register(self)
        host, port = config.monitor.prometheus_host, config.monitor.prometheus_port
        try:
            self._server, self._thread = start_http_server(port, host, registry)
        except (OSError, OverflowError) as error:
            text = f"monitor.prometheus_port={port} cannot be had on monitor.prometheus_host={host}: {error}"
            raise ConfigError(f"{text}; use another port, 0 for any that is free, or -1 for none") from error
        self.url = f"http://{host}:{self._server.server_port}/metrics"

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """What an evaluation measured stays until the next one; everything else is of this step."""
        evaluated = {name: value for name, value in self._told[2].items() if name.startswith("eval/")}
        counted = {name: value for name, value in metrics.items() if family(name)[0] in PER_STEP}
        self._sums = self._sums | {name: self._sums.get(name, 0.0) + value for name, value in counted.items()}
        self._told = (step, time.time(), evaluated | dict(metrics))

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def collect(self) -> Iterator[Any]:
        """prometheus_client asks this at every request."""
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, InfoMetricFamily, StateSetMetricFamily

        step, when, values = self._told
        names, run = list(self._labels), list(self._labels.values())
        state = self._read_state()
        info = InfoMetricFamily("megaflow_run", "the run", labels=names)
        info.add_metric(run, self._info)
        states = StateSetMetricFamily("megaflow_status", "1 for the state of the run, as in status.json", labels=names)
        states.add_metric(run, {each: each == state for each in STATES})
        yield from (info, states)
        own = {
            "step": ("last step that was finished", step),
            "steps": ("run.steps, the last step of the run", self._steps_total),
            "last_step_timestamp_seconds": ("when that step was finished, seconds since 1970; 0: none yet", when),
        }
        for name, (doc, value) in own.items():
            gauge = GaugeMetricFamily(f"megaflow_{name}", doc, labels=names)
            gauge.add_metric(run, value)
            yield gauge
        gauges = {name: value for name, value in values.items() if name not in CUMULATIVE}
        counters = {name: value for name, value in values.items() if name in CUMULATIVE}
        yield from self._families(gauges, GaugeMetricFamily, "megaflow_", "")
        yield from self._families(counters, CounterMetricFamily, "megaflow_", "")
        yield from self._families(self._sums, CounterMetricFamily, "megaflow_run_", "; summed since the process began")

    def _families(self, values: Mapping[str, float], kind: Any, prefix: str, added: str) -> Iterator[Any]:
        """Metrics that differ in their labels only are one family."""
        found: dict[str, Any] = {}
        for name, value in values.items():
            entry, bare, labels = family(name)
            every = self._labels | labels
            if bare not in found:
                found[bare] = kind(prefix + bare, METRICS.get(entry, name) + added, labels=list(every))
            found[bare].add_metric(list(every.values()), value)
        yield from found.values()
