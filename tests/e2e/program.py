"""The real program under test: started as a user does, watched, killed, and what it left in its run directory."""

from __future__ import annotations

import contextlib
import json
import signal
import subprocess
import sys
import time
import uuid
from pathlib import Path
from typing import Any

import psutil
import yaml

from tests.ranks import ROOT, clean_env, free_port

MARK = "MEGAFLOW_TEST_PROGRAM"  # in the environment of all that a program starts


class Program:
    """One start of a launch script; output goes to `log`, so that no orphan can keep a pipe open. Ends with the `with` block."""

    def __init__(
        self,
        log: Path,
        ranks: int,
        script: str,
        *arguments: str,
        launcher: bool = True,
        restarts: int = 0,
        env: dict[str, str] | None = None,
    ):
        """restarts: torchrun's --max-restarts; env: beside a clean one."""
        self.log = log
        self.mark = uuid.uuid4().hex
        self.started = time.time()
        torchrun = ["-m", "torch.distributed.run", "--nproc-per-node", str(ranks), "--max-restarts", str(restarts)]
        torchrun += ["--master-addr", "127.0.0.1", "--master-port", str(free_port())]  # a host name may not resolve
        command = [sys.executable, *(torchrun if launcher else ()), script, *arguments]
        with log.open("w") as out:
            self.process = subprocess.Popen(
                command, cwd=ROOT, env={**clean_env(), MARK: self.mark, **(env or {})}, stdout=out, stderr=subprocess.STDOUT,
                start_new_session=True,
            )  # fmt: skip
        self._seen: dict[int, psutil.Process] = {}

    @property
    def output(self) -> str:
        return self.log.read_text(errors="replace")

    def wait(self, timeout: float) -> int:
        """The exit code. Fails with the output when it takes longer."""
        try:
            return self.process.wait(timeout)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"still running after {timeout} s:\n{self.output[-5000:]}") from None

    def wait_until(self, condition, timeout: float, what: str) -> None:
        """Polls; fails when the program ends first."""
        deadline = time.monotonic() + timeout
        while not condition():
            assert self.process.poll() is None, f"ended with {self.process.returncode} before {what}:\n{self.output[-5000:]}"
            assert time.monotonic() < deadline, f"no {what} within {timeout} s:\n{self.output[-5000:]}"
            time.sleep(0.05)

    def family(self) -> list[psutil.Process]:
        """All living processes that come from this start: descendants now or when last asked, and whoever carries its mark."""
        with contextlib.suppress(psutil.NoSuchProcess):
            me = psutil.Process(self.process.pid)
            self._seen |= {p.pid: p for p in (me, *me.children(recursive=True))}
        for p in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                if p.create_time() >= self.started - 1 and p.environ().get(MARK) == self.mark:
                    self._seen[p.pid] = p
        return [p for p in self._seen.values() if _lives(p)]

    def ranks(self) -> list[psutil.Process]:
        """The rank processes, in order of their rank."""
        found = []
        for p in psutil.Process(self.process.pid).children():
            with contextlib.suppress(psutil.Error):
                if "RANK" in p.environ():
                    found.append((int(p.environ()["RANK"]), p))
        return [p for _, p in sorted(found, key=lambda pair: pair[0])]

    def engines(self) -> list[psutil.Process]:
        """The host processes of the engines that the ranks have now."""
        return [p for rank in self.ranks() for p in _children(rank) if "engine_host" in " ".join(_command(p))]

    def schedulers(self) -> list[psutil.Process]:
        """Of those engines that have started."""
        return [p for host in self.engines() for p in _children(host) if "sglang::scheduler" in " ".join(_command(p))]

    def seconds_to_its_end(self, since: Path, timeout: float) -> float:
        """It ends by itself, not well, and nothing of it is left. since: a file with the time from which the seconds count."""
        self.family()  # who they are, while the tree stands
        assert self.wait(timeout) != 0
        seconds = time.time() - float(since.read_text())
        left = self.family()
        assert not left, describe(left)
        return seconds

    def kill_9(self) -> list[psutil.Process]:
        """SIGKILL to the launcher and its ranks, as an out-of-memory killer or a lost host would; what still lives 10 s later."""
        self.family()  # who they are, while the tree stands
        for p in (psutil.Process(self.process.pid), *self.ranks()):
            _kill(p)
        self.process.wait(10)
        deadline = time.monotonic() + 10
        while (left := self.family()) and time.monotonic() < deadline:
            time.sleep(0.1)
        return left

    def __enter__(self) -> Program:
        return self

    def __exit__(self, *_: object) -> None:
        for p in self.family():
            _kill(p)
        self.process.wait(10)


def _children(p: psutil.Process) -> list[psutil.Process]:
    with contextlib.suppress(psutil.Error):
        return p.children()
    return []


def _command(p: psutil.Process) -> list[str]:
    with contextlib.suppress(psutil.Error):
        return p.cmdline()
    return []


def _lives(p: psutil.Process) -> bool:
    try:
        return p.is_running() and p.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def _kill(p: psutil.Process) -> None:
    with contextlib.suppress(psutil.NoSuchProcess):
        p.send_signal(signal.SIGKILL)


def describe(processes: list[psutil.Process]) -> list[str]:
    """For a failure's message."""
    found = []
    for p in processes:
        with contextlib.suppress(psutil.Error):
            found.append(f"{p.pid} (parent {p.ppid()}): {' '.join(p.cmdline())[:200]}")
    return found


def run(tmp: Path, ranks: int, script: str, *arguments: str, timeout: float = 150.0) -> tuple[int, str]:
    """Start to end, one rank without torchrun -> (exit code, output); nothing of it may be left afterwards."""
    log = tmp / f"{uuid.uuid4().hex[:8]}.log"
    with Program(log, ranks, script, *arguments, launcher=ranks > 1) as program:
        code = program.wait(timeout)
        deadline = time.monotonic() + 10
        while (left := program.family()) and time.monotonic() < deadline:
            time.sleep(0.1)
        assert not left, f"left behind: {describe(left)}"
        return code, program.output


# --- what a run is configured with, and what it leaves --------------------------------------------------------------------------------

TRAIN = "launch/train_grpo.py"
EVALUATE = "launch/evaluate.py"


def write_config(path: Path, made: Path, **sections: dict[str, Any]) -> str:
    """A small run on two ranks, with the model and data in the folder `made`; `sections` change it, key by key."""
    config: dict[str, Any] = {
        "base": str(ROOT / "yaml" / "base" / "grpo.yaml"),
        "run": {"root": str(path.parent / "runs"), "name": path.stem, "steps": 4, "save_every": 2, "deterministic": True, "timeout_s": 120},
        "model": {"path": str(made / "model"), "dtype": "float32"},
        "parallel": {"tp": 2},
        "data": {"train": [{"path": str(made / "data" / "train.jsonl"), "name": "sums"}], "max_prompt_tokens": 64},
        "rollout": {"backend": "hf", "prompts_per_step": 4, "samples_per_prompt": 4, "max_tokens": 4096, "timeout_s": 60},
        "sampling": {"max_new_tokens": 6},
        "actor": {"lr": 1e-3, "mini_batch": 8, "micro_batch_tokens": 256},
        "reward": {"functions": [{"name": f"{ROOT}/tests/programs/rewards.py:digits"}], "workers": 1},
        "monitor": {"samples_per_step": -1, "plot": False},
    }
    for name, values in sections.items():
        config.setdefault(name, {}).update(values)
    path.write_text(yaml.safe_dump(config))
    return str(path)


def status(directory: Path) -> dict[str, Any]:
    return json.loads((directory / "status.json").read_text())


def metrics(directory: Path) -> list[dict[str, Any]]:
    path = directory / "metrics.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def samples(directory: Path) -> dict[str, list[dict[str, Any]]]:
    """By file name."""
    return {p.name: [json.loads(line) for line in p.read_text().splitlines()] for p in sorted((directory / "samples").glob("*.jsonl"))}


def last_step(directory: Path) -> int:
    """As the metrics say; 0 before the first. A line half written does not count."""
    path = directory / "metrics.jsonl"
    text = path.read_text() if path.exists() else ""
    return max((json.loads(line)["step"] for line in text.splitlines(keepends=True) if line.endswith("\n")), default=0)


def files(directory: Path) -> dict[str, bytes]:
    """Every file below, by its path, except logs."""
    return {str(p.relative_to(directory)): p.read_bytes() for p in sorted(directory.rglob("*")) if p.is_file()}
