"""Slurm's variables into torchrun's. The environments are those that srun 22.05 sets."""

from __future__ import annotations

import pytest

from megaflow.slurm import adopt, port_of_step, tasks_of_node
from megaflow.types import ConfigError

STEP = {
    "SLURM_JOB_ID": "71",
    "SLURM_STEP_ID": "1",
    "SLURM_PROCID": "11",
    "SLURM_LOCALID": "3",
    "SLURM_NODEID": "1",
    "SLURM_STEP_NUM_TASKS": "20",
    "SLURM_STEP_TASKS_PER_NODE": "8(x2),4",
    "SLURM_STEP_NODELIST": "gpu[07-09]",
}


def test_a_step_of_several_nodes() -> None:
    environ = dict(STEP)
    assert adopt(environ, {"gpu[07-09]": ["gpu07", "gpu08", "gpu09"]}.__getitem__)
    added = {k: v for k, v in environ.items() if k not in STEP}
    port = added.pop("MASTER_PORT")
    assert added == {"RANK": "11", "WORLD_SIZE": "20", "LOCAL_RANK": "3", "LOCAL_WORLD_SIZE": "8", "MASTER_ADDR": "gpu07"}
    assert 20000 <= int(port) < 40000


def test_one_node_needs_no_scontrol_and_a_given_address_stays() -> None:
    environ = STEP | {"SLURM_STEP_NODELIST": "gpu07", "SLURM_STEP_TASKS_PER_NODE": "20", "SLURM_NODEID": "0", "MASTER_PORT": "4321"}
    assert adopt(environ, lambda _: pytest.fail("asked scontrol"))
    assert (environ["MASTER_ADDR"], environ["MASTER_PORT"], environ["LOCAL_WORLD_SIZE"]) == ("gpu07", "4321", "20")


@pytest.mark.parametrize(
    "environ",
    [
        {},
        STEP | {"RANK": "0"},  # torchrun within a step
        STEP | {"SLURM_STEP_NUM_TASKS": "1"},  # an interactive shell
        {"SLURM_JOB_ID": "71", "SLURM_PROCID": "0", "SLURM_NTASKS": "8"},  # a batch script
    ],
)
def test_left_alone(environ) -> None:
    before = dict(environ)
    assert not adopt(environ)
    assert environ == before


@pytest.mark.parametrize(("text", "counts"), [("2", [2]), ("8(x2),4", [8, 8, 4]), ("1,3(x2)", [1, 3, 3])])
def test_tasks_of_a_node(text, counts) -> None:
    assert [tasks_of_node(text, i) for i in range(len(counts))] == counts
    with pytest.raises(ConfigError, match="node"):
        tasks_of_node(text, len(counts))


def test_tasks_that_make_no_sense() -> None:
    with pytest.raises(ConfigError, match="8of2"):
        tasks_of_node("8of2", 0)


def test_steps_that_run_at_the_same_time_have_their_own_ports() -> None:
    ports = {port_of_step(job, step) for job in range(1000, 1400) for step in range(4)}
    assert len(ports) == 1600


def test_a_step_that_says_too_little_is_refused_before_anything_is_set(monkeypatch, tmp_path) -> None:
    environ = {name: value for name, value in STEP.items() if name != "SLURM_LOCALID"}
    before = dict(environ)
    with pytest.raises(ConfigError, match="does not set SLURM_LOCALID; start its ranks with torchrun"):
        adopt(environ)
    assert environ == before
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ConfigError, match=r"which hosts gpu\[07-09\] are .* set MASTER_ADDR"):
        adopt(dict(STEP))
