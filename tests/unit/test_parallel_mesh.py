"""The parts of the mesh that need no other rank."""

from __future__ import annotations

import datetime
import os

import pytest
import torch
import torch.distributed as dist

from megaflow.config.schema import ParallelConfig
from megaflow.parallel.mesh import check_sizes, single_rank_env, store_of_this_start
from megaflow.types import ConfigError

TORCHRUN = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def test_without_a_launcher_there_is_one_rank_that_needs_no_port(monkeypatch):
    """Runs that begin at the same moment found the same port free, and one of them failed."""
    for name in TORCHRUN:
        monkeypatch.setenv(name, "x")  # so that what the function sets is undone after the test
        monkeypatch.delenv(name)
    single_rank_env()
    assert [os.environ.get(n) for n in TORCHRUN] == ["0", "0", "1", "1", None, None]
    made = store_of_this_start(datetime.timedelta(seconds=5))
    dist.init_process_group("gloo", **made)
    try:
        x = torch.ones(1)
        dist.all_reduce(x, group=dist.new_group([0], backend="gloo"))
        assert float(x) == 1 and dist.get_world_size() == 1
    finally:
        dist.destroy_process_group()


def test_a_launchers_settings_are_left_alone(monkeypatch):
    monkeypatch.setenv("RANK", "3")
    monkeypatch.setenv("MASTER_PORT", "29511")
    single_rank_env()
    assert os.environ["RANK"] == "3" and os.environ["MASTER_PORT"] == "29511"


@pytest.mark.parametrize(
    ("parallel", "rollout_tp", "ranks", "message"),
    [
        (ParallelConfig(tp=2, pp=2), 1, 6, "multiple of tp\\*pp\\*cp=4"),
        (ParallelConfig(cp=2, tp=2), 1, 6, "multiple of tp\\*pp\\*cp=4"),
        (ParallelConfig(ep=4), 1, 6, "multiple of etp\\*ep\\*pp=4"),
        (ParallelConfig(ep=2, etp=2, tp=2), 1, 6, "multiple of etp\\*ep\\*pp=4"),
        (ParallelConfig(), 2, 3, "rollout.tp must divide"),
        (ParallelConfig(vpp=2), 1, 2, "parallel.vpp=2 divides a pipeline's stages further, and parallel.pp is 1"),
    ],
)
def test_sizes_that_do_not_fit_are_an_error_with_every_number(parallel, rollout_tp, ranks, message):
    with pytest.raises(ConfigError, match=message) as error:
        check_sizes(parallel, rollout_tp, ranks)
    assert f"ranks={ranks}, tp={parallel.tp}, pp={parallel.pp}" in str(error.value)
