"""Which transport a sync takes, and what it says when it can take none."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace

import pytest

from megaflow.config.schema import Config, SyncConfig
from megaflow.trainer.sync import choose_transport
from megaflow.types import ConfigError
from megaflow.weights.pull import Source
from tests.unit.test_weights_pull import make_shape, places

ONE_HOST = Source(places(2, 2, 2), tp=2, pp=2)
STAGES_APART = Source(places(2, 2, 2, hosts=2), tp=2, pp=2)


def chosen(transport: str, source: Source, family: str = "qwen3") -> str:
    config = dataclasses.replace(Config(), sync=SyncConfig(transport=transport))
    return choose_transport(config, SimpleNamespace(shape=make_shape(family, kv_heads=4)), source)


def test_auto_pulls_on_one_host_and_goes_in_buckets_over_several():
    assert chosen("auto", ONE_HOST) == chosen("pull", ONE_HOST) == "pull"
    assert chosen("auto", STAGES_APART) == chosen("buckets", STAGES_APART) == chosen("buckets", ONE_HOST) == "buckets"
    assert chosen("buckets", dataclasses.replace(ONE_HOST, vpp=2), family="qwen3_moe") == "buckets"


def test_what_cannot_be_is_refused_with_its_numbers():
    with pytest.raises(ConfigError, match=r"tp=2, pp=2, ep=1 over 2 hosts\); use sync.transport=buckets"):
        chosen("pull", STAGES_APART)
