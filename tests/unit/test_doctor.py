"""The doctor: what it says of machines that are wrong, and that it comes through on this one."""

from __future__ import annotations

import resource
import socket
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest

from megaflow.plan import links, machine

ROOT = Path(__file__).parents[2]


def test_pins_are_those_of_setup():
    pins = machine.pins(ROOT / "setup.py")
    assert pins["torch"] == "2.11.0" and pins["sglang"] == "0.5.15" and pins["nvidia-ml-py"].startswith("13.")
    assert "aiohttp" not in pins, "what only one profile needs is not asked for"


def test_packages_that_are_missing_or_of_another_version():
    def installed(name: str) -> str:
        if name == "sglang":
            raise metadata.PackageNotFoundError(name)
        return {"torch": "2.11.0+cu130", "numpy": "2.5.2"}[name]

    found = list(machine.packages({"torch": "2.11.0", "numpy": "2.3.5", "sglang": "0.5.15"}, installed))
    assert [(f.state, f.name) for f in found] == [("warn", "numpy"), ("bad", "sglang"), ("ok", "packages")]
    assert found[1].line() == "bad   sglang: not installed; pip install sglang==0.5.15 (make setup installs all)"
    assert found[2].line() == "ok    packages: 1 of 3 are as setup.py pins them"


def test_old_python_and_few_files():
    assert machine.python_version("3.11.9").state == "bad" and machine.python_version("3.12.0").state == "ok"
    assert machine.open_files(1024, 1048576).state == "warn" and "ulimit -n 4096" in machine.open_files(1024, 1048576).line()
    assert "limits.conf" in machine.open_files(1024, 1024).line()
    assert machine.open_files(resource.RLIM_INFINITY, resource.RLIM_INFINITY).state == "ok"


def test_a_port_that_is_taken():
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        number = other.getsockname()[1]
        found = machine.port(number)
        assert found.state == "warn" and "--standalone" in found.mend
        assert machine.port(number, is_ours=True).state == "ok"
    assert machine.port(number).state == "ok"


def test_names_of_hosts():
    def unknown(name: str) -> str:
        raise socket.gaierror(-2, "Name or service not known")

    assert machine.host_name("n1", True, unknown).state == "bad" and machine.host_name("n1", False, unknown).state == "warn"
    assert machine.host_name("n1", True, lambda name: "127.0.1.1").state == "bad", "others would find themselves"
    assert machine.host_name("n1", True, lambda name: "10.0.0.7").state == "ok"


def test_disk_that_is_full_or_cannot_be_written(tmp_path, monkeypatch):
    usage = machine.shutil.disk_usage(tmp_path)
    for free, state in ((100 << 30, "ok"), (5 << 30, "warn"), (1 << 20, "bad")):
        monkeypatch.setattr(machine.shutil, "disk_usage", lambda path, free=free: usage._replace(free=free))
        assert machine.free_disk("run.root", tmp_path / "not" / "yet").state == state
    monkeypatch.setattr(machine.os, "access", lambda path, mode: False)
    assert machine.free_disk("run.root", tmp_path).state == "bad"


def test_small_shared_memory(tmp_path, monkeypatch):
    usage = machine.shutil.disk_usage(tmp_path)
    monkeypatch.setattr(machine.shutil, "disk_usage", lambda path: usage._replace(total=64 << 20))
    assert "0.06 GiB; NCCL wants 1 GiB" in machine.shared_memory(str(tmp_path)).line()
    assert machine.shared_memory(str(tmp_path / "none")).state == "bad"


def test_a_child_that_cannot_read_a_memfd(monkeypatch):
    assert machine.memfd().state == "ok"
    monkeypatch.setattr(machine, "READ_MEMFD", "raise PermissionError('hidden')")
    assert machine.memfd().state == "bad" and "PermissionError: hidden" in machine.memfd().text


def test_clocks_that_are_apart():
    assert links.clocks([5.0, 5.2]).state == "ok"
    wrong = links.clocks([5.0, 9.0, 5.1])
    assert wrong.state == "warn" and "rank 1 is ahead of rank 0" in wrong.text
    assert links.clocks([5.0, 500.0]).state == "bad"


def test_speed_is_bytes_over_seconds(monkeypatch):
    """Each copy takes a tenth of a second by this clock: 4 copies of 1e9 bytes in 0.4 s, and then it has measured long enough."""
    now = [0.0]
    monkeypatch.setattr(links.time, "perf_counter", lambda: now[0])

    def copy() -> None:
        now[0] += 0.1

    assert links.repeated(copy, 10**9) == pytest.approx(10.0)
    assert links.judged("x", 3.0, 8.0, "look").line() == "warn  x: 3 GB/s; below 8 GB/s: look"


@pytest.fixture
def one_rank():
    import torch.distributed as dist

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield dist
    dist.destroy_process_group()


def test_nccl_is_measured_where_each_rank_has_a_gpu_and_its_failure_is_a_finding(one_rank, monkeypatch):
    import torch

    monkeypatch.setenv("LOCAL_RANK", "99")
    assert list(links._through_nccl()) == [], "it has no GPU of its own"
    monkeypatch.setenv("LOCAL_RANK", "0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "set_device", lambda index: None)

    def refuse(**_):
        raise RuntimeError("NCCL error: unhandled system error\nmore lines")

    monkeypatch.setattr(one_rank, "new_group", refuse)
    (found,) = links._through_nccl()
    assert found.line().startswith("bad   NCCL, 1 ranks: NCCL error: unhandled system error; NCCL_DEBUG=INFO")


def test_hosts_that_differ():
    sys.path.insert(0, str(ROOT))
    from tools import doctor

    assert doctor.agreement({"a": "torch=1", "b": "torch=1"}).state == "ok"
    assert "b: torch=2" in doctor.agreement({"a": "torch=1", "b": "torch=2"}).text
    found = [machine.Finding("bad", "x", "y", "z"), machine.Finding("ok", "x", "y")]
    assert doctor.verdict(found) == "1 ok, 0 warn, 1 bad: runs will fail here"


@pytest.mark.timeout(60)
def test_it_comes_through_here_and_writes_nothing(tmp_path):
    done = subprocess.run(
        [sys.executable, "tools/doctor.py", f"run.root={tmp_path}/runs", f"run.cache_dir={tmp_path}"],
        cwd=ROOT, capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    states = {line.split()[0] for line in done.stdout.splitlines()[:-1]}
    assert states <= {"ok", "warn", "bad"} and done.returncode == (3 if "bad" in states else 0), done.stdout + done.stderr
    assert "memfd: a child process reads it" in done.stdout and "GB/s" in done.stdout and not list(tmp_path.iterdir())
