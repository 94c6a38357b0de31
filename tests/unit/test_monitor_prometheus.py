"""What a Prometheus server would get: a real scrape of a run, read by prometheus_client's own parser."""

from __future__ import annotations

import dataclasses
import math
import re
import socket
import urllib.request
from collections.abc import Iterator
from typing import Any

import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics
from prometheus_client.parser import text_string_to_metric_families

from megaflow.config.schema import Config, MonitorConfig
from megaflow.monitor.metrics import METRICS
from megaflow.monitor.prometheus import CUMULATIVE, PER_STEP, STATES, Exporter, family
from megaflow.trainer import status
from megaflow.types import ConfigError

OPENMETRICS = "application/openmetrics-text; version=1.0.0"


def config(port: int, name: str = "r") -> Config:
    cfg = Config()
    return dataclasses.replace(cfg, run=dataclasses.replace(cfg.run, name=name), monitor=MonitorConfig(prometheus_port=port))


def get(url: str, accept: str = "text/plain") -> str:
    with urllib.request.urlopen(urllib.request.Request(url, headers={"Accept": accept}), timeout=5) as answer:
        return answer.read().decode()


def scrape(url: str) -> dict[str, Any]:
    """family -> prometheus_client's own record of it."""
    return {each.name: each for each in text_string_to_metric_families(get(url))}


def values(found: Any) -> dict[tuple[tuple[str, str], ...], float]:
    """labels but `run` -> value."""
    assert all(sample.labels["run"] == 'a "run"' for sample in found.samples)
    return {tuple((k, v) for k, v in sorted(s.labels.items()) if k != "run"): s.value for s in found.samples}


@pytest.fixture
def exporter() -> Iterator[Exporter]:
    made = Exporter(config(0, 'a "run"'), lambda: "running", steps_total=9)
    yield made
    made.close()


def test_a_scrape(exporter: Exporter) -> None:
    exporter.log(0, {"eval/sums/accuracy": 0.25, "eval/sums/pass@4": 0.5})
    exporter.log(1, {"reward/mean": 0.25, "reward/exact": 0.5, "reward/number": 1.0, "batch/tokens": 100.0, "guard/actions": 1.0})
    times = {"time/rollout": 2.0, "time/step": 3.0}
    exporter.log(2, {"reward/mean": 0.75, "train/loss": math.nan, "batch/tokens": 60.0, "guard/actions": 2.0} | times)
    found = scrape(exporter.url)
    assert values(found["megaflow_reward_mean"]) == {(): 0.75} and found["megaflow_reward_mean"].type == "gauge"
    assert found["megaflow_reward_mean"].documentation == METRICS["reward/mean"]
    assert "megaflow_reward" not in found  # reward/exact was of step 1
    assert values(found["megaflow_eval_accuracy"]) == {(("set", "sums"),): 0.25}  # until the next evaluation
    assert values(found["megaflow_eval_pass"]) == {(("k", "4"), ("set", "sums")): 0.5}
    assert values(found["megaflow_phase_seconds"]) == {(("phase", "rollout"),): 2.0} and values(found["megaflow_step_seconds"]) == {(): 3.0}
    assert math.isnan(values(found["megaflow_train_loss"])[()])
    assert (values(found["megaflow_step"]), values(found["megaflow_steps"])) == ({(): 2.0}, {(): 9.0})
    tokens, actions = found["megaflow_run_batch_tokens"], found["megaflow_guard_actions"]
    assert [s.name for s in tokens.samples] == ["megaflow_run_batch_tokens_total"] and tokens.type == actions.type == "counter"
    assert values(tokens) == {(): 160.0} and values(actions) == {(): 2.0} and values(found["megaflow_batch_tokens"]) == {(): 60.0}
    states = {sample.labels["megaflow_status"]: sample.value for sample in found["megaflow_status"].samples}
    assert states["running"] == 1.0 and sum(states.values()) == 1.0
    assert found["megaflow_run_info"].samples[0].labels["project"] == "megaflow"
    # what a server asks for that prefers OpenMetrics; its parser also refuses a family that comes twice
    names = {each.name for each in parse_openmetrics(get(exporter.url, OPENMETRICS))}
    assert names >= {"megaflow_reward_mean", "megaflow_run_batch_tokens"}


def test_labels_of_one_family(exporter: Exporter) -> None:
    exporter.log(1, {"reward/exact": 0.5, "reward/number": 1.0})
    assert values(scrape(exporter.url)["megaflow_reward"]) == {(("fn", "exact"),): 0.5, (("fn", "number"),): 1.0}


def test_a_port_that_is_taken() -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        with pytest.raises(ConfigError, match=f"monitor.prometheus_port={port} cannot be had on .*127.0.0.1: .*in use; use another"):
            Exporter(config(port), lambda: "running", 1)


def test_states_are_those_of_status_json() -> None:
    assert set(STATES) == {"running", "done", "stopped", "crashed", *status.STATES.values()}


def test_every_metric_has_a_name_of_its_own() -> None:
    names = [family(entry)[1] for entry in METRICS] + [f"run_{family(entry)[1]}" for entry in PER_STEP] + ["step", "steps", "status", "run"]
    assert len(set(names)) == len(names)
    assert all(re.fullmatch(r"[a-z][a-z0-9_]*", name) for name in names)
    assert set(PER_STEP + CUMULATIVE) <= set(METRICS)
