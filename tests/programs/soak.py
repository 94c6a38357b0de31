"""A long run under random faults, against the same run undisturbed:  python -m tests.programs.soak --steps 200 --sglang-steps 60

Every few steps something breaks: an engine's process is killed or stops, a rank is killed (torchrun --max-restarts starts all anew), a rank
stands still for a while, the reward service is down, the disk is full (with root: run directories lie on a small tmpfs), somebody stops the
run and starts it again. In the end every step is there once, samples and weights are bitwise those of the undisturbed run, and no process,
shared memory or temporary file is left. The steps are the quickstart's with a smaller batch; part of them with SGLang, the others with hf.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
import zlib
from collections import Counter
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import psutil

from tests.e2e.program import TRAIN, Program, describe, last_step, metrics, samples, status
from tools.make_tiny_model import make

DISK_MB = 64
HANG_S = 8  # rollout.timeout_s
SMALL = ["rollout.prompts_per_step=8", "rollout.samples_per_prompt=4", "actor.mini_batch=16", "actor.micro_batch_tokens=512"]


class Service:
    """A reward model behind HTTP whose taste nobody can learn, so that gradients do not vanish; while it is down it answers 503."""

    def __init__(self) -> None:
        service = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                scores = [zlib.crc32(text.encode()) % 1000 / 1000 for text in asked["responses"]]
                self.send_response(503 if service.down else 200)
                self.end_headers()
                self.wfile.write(json.dumps({"scores": scores}).encode())

            def log_message(self, *_: object) -> None:
                return

        self.down = False
        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    @property
    def settings(self) -> list[str]:
        where = f"http://127.0.0.1:{self.server.server_address[1]}"
        return ["reward.model.where=remote", f"reward.model.url={where}", "reward.model.weight=0.1", "reward.model.backoff_s=0.2"]


class Soak:
    """One backend's two runs. `place`: a folder of its own."""

    def __init__(self, place: Path, disk: Path | None, backend: str, steps: int, every: int, seed: int):
        self.place, self.disk, self.backend, self.steps, self.every = place, disk, backend, steps, every
        self.rng, self.service, self.faults = random.Random(f"{seed} {backend}"), Service(), Counter()
        self.root = (disk or place) / "runs"
        self.tmp = place / f"tmp_{backend}"
        self.tmp.mkdir()
        self.straight, self.disturbed = self.root / f"{backend}_straight", self.root / f"{backend}_disturbed"
        self.seconds: dict[str, float] = {}
        self.deck: list[str] = []
        self.starts_anew = False
        self.starts = 0

    def arguments(self, name: str) -> list[str]:
        data = f"[{{path: {self.place}/data/train.jsonl, name: addition}}]"
        return [
            "--config", "yaml/quickstart.yaml", f"run.root={self.root}", f"run.name={name}", f"run.steps={self.steps}",
            "run.save_every=5", "run.export_hf=true", f"model.path={self.place}/model", f"data.train={data}", "data.eval=[]",
            "eval.before=false", f"rollout.backend={self.backend}", f"rollout.timeout_s={HANG_S}", "rollout.max_restarts=1000",
            "monitor.samples_per_step=-1", "monitor.plot=false", *SMALL, *self.service.settings,
        ]  # fmt: skip

    def start(self, name: str) -> Program:
        self.starts += 1
        log = self.place / f"{name}_{self.starts}.log"
        return Program(log, 2, TRAIN, *self.arguments(name), restarts=1000, env={"TMPDIR": str(self.tmp)})

    def run_straight(self) -> None:
        began = time.monotonic()
        with self.start(self.straight.name) as program:
            assert program.wait(36_000) == 0, program.output[-5000:]
        self.seconds["straight"] = time.monotonic() - began

    def run_disturbed(self) -> None:
        began, at = time.monotonic(), self._next_fault(0)
        while True:
            self.starts_anew = False
            with self.start(self.disturbed.name) as program:
                while program.process.poll() is None:
                    if last_step(self.disturbed) >= at:
                        time.sleep(self.rng.uniform(0, 2))
                        self._break_something(program)
                        at = self._next_fault(max(at, last_step(self.disturbed)))
                    if self.starts_anew and status(self.disturbed)["state"] == "stopped":
                        program.process.terminate()  # torchrun would try all its restarts in vain
                    time.sleep(0.1)
                self._nothing_lives(program)
                state = status(self.disturbed)["state"]
                if state != "stopped":
                    assert program.process.returncode == 0 and state == "done", (state, program.output[-5000:])
                    break
        self.seconds["disturbed"] = time.monotonic() - began

    def _next_fault(self, step: int) -> int:
        return step + self.rng.randint(1, max(1, 2 * self.every - 1))

    def _break_something(self, program: Program) -> None:
        kinds: dict[str, Callable[[Program], bool]] = {
            "a rank is killed": lambda p: self._signal(p.ranks(), signal.SIGKILL),
            "a rank gets USR1": lambda p: self._signal(p.ranks(), signal.SIGUSR1),
            "a rank stands still for 3 s": self._pause,
            "the reward service is down for 5 s": self._service_down,
            "stopped and started again": self._stop,
        }
        if self.disk is not None:
            kinds["the disk is full for 5 s"] = self._fill_disk
        if self.backend == "sglang":
            kinds |= {
                "an engine's host is killed": lambda p: self._signal(p.engines(), signal.SIGKILL),
                "an engine's scheduler is killed": lambda p: self._signal(p.schedulers(), signal.SIGKILL),
                "an engine's scheduler hangs": lambda p: self._signal(p.schedulers(), signal.SIGSTOP),
                "an engine's host hangs": lambda p: self._signal(p.engines(), signal.SIGSTOP),
            }
        if not self.deck:  # each kind once, in a random order, then again
            self.deck = self.rng.sample(list(kinds), len(kinds))
        kind = self.deck.pop()
        while not kinds[kind](program) and program.process.poll() is None:  # what is to be hit is only being started
            time.sleep(0.2)
        if program.process.poll() is None:
            self.faults[kind] += 1
            print(f"{time.strftime('%H:%M:%S')} {self.backend} step {last_step(self.disturbed)}: {kind}", flush=True)

    def _signal(self, processes: list[psutil.Process], number: int) -> bool:
        with contextlib.suppress(psutil.NoSuchProcess, IndexError):  # it is being started anew
            self.rng.choice(processes).send_signal(number)
            return True
        return False

    def _pause(self, program: Program) -> bool:
        with contextlib.suppress(psutil.NoSuchProcess, IndexError):
            rank = self.rng.choice(program.ranks())
            rank.suspend()
            time.sleep(3)
            rank.resume()
            return True
        return False

    def _service_down(self, program: Program) -> bool:
        self.service.down = True
        time.sleep(5)
        self.service.down = False
        return True

    def _stop(self, program: Program) -> bool:
        (self.disturbed / "STOP").touch()
        self.starts_anew = True
        return True

    def _fill_disk(self, program: Program) -> bool:
        ballast = self.disk / "ballast"
        with contextlib.suppress(OSError), ballast.open("wb") as file:
            while True:
                file.write(bytes(1 << 16))
                file.flush()
        time.sleep(5)
        ballast.unlink()
        return True

    def _nothing_lives(self, program: Program) -> None:
        deadline = time.monotonic() + 30
        while (left := program.family()) and time.monotonic() < deadline:
            time.sleep(0.2)
        assert not left, f"left behind: {describe(left)}"

    def compare(self) -> list[str]:
        """What differs from the undisturbed run, or is left; nothing when all is well."""
        mine, its = self.disturbed, self.straight
        wrong = []
        if [m["step"] for m in metrics(mine)] != list(range(1, self.steps + 1)):
            wrong.append("metrics.jsonl has not each step once")
        if samples(mine) != samples(its):
            wrong.append(f"samples differ: {[n for n, lines in samples(its).items() if samples(mine).get(n) != lines]}")
        if (mine / "hf/model.safetensors").read_bytes() != (its / "hf/model.safetensors").read_bytes():
            wrong.append("final weights differ")
        left = [p.name for p in self.tmp.iterdir() if not p.name.startswith("torchelastic_")]  # torchrun's own logs
        return wrong + ([f"temporary files are left: {left}"] if left else [])

    def summary(self) -> str:
        restarts = sum(m.get("rollout/engine_restarts", 0) for m in metrics(self.disturbed))
        lost = sum(m.get("rollout/restart_s", 0) for m in metrics(self.disturbed))
        rows = [f"| {kind} | {number} |" for kind, number in sorted(self.faults.items())]
        times = f"{self.seconds['straight']:.0f} s undisturbed, {self.seconds['disturbed']:.0f} s with {self.faults.total()} faults"
        engines = f"; {restarts:.0f} engines started anew in {lost:.0f} s" if self.backend == "sglang" else ""
        return "\n".join([f"{self.backend}: {self.steps} steps, {times}, {self.starts - 1} starts{engines}", *rows])


def mounted(place: Path, megabytes: int) -> bool:
    """A tmpfs at `place`, for this process and its children alone."""
    mount = ["mount", "-t", "tmpfs", "-o", f"size={megabytes}m", "tmpfs", str(place)]
    return subprocess.run(mount, capture_output=True).returncode == 0


def leave_the_others() -> bool:
    """Into a namespace of mounts of our own, with an empty /dev/shm, so that what is left there is ours. Needs root."""
    if os.geteuid():
        return False
    with contextlib.suppress(OSError):
        os.unshare(os.CLONE_NEWNS)
        subprocess.run(["mount", "--make-rprivate", "/"], check=True, capture_output=True)
        return mounted(Path("/dev/shm"), 1024)
    return False


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--sglang-steps", type=int, default=60, help="of --steps, those with SGLang")
    parser.add_argument("--every", type=int, default=5, help="steps between two faults, on average")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--dir", type=Path, help="a new folder for logs and runs; without it they go when all is well")
    options = parser.parse_args()
    is_alone = leave_the_others()
    failures = []
    place = options.dir or Path(tempfile.mkdtemp(prefix="soak-"))
    place.mkdir(exist_ok=True)
    make(place / "model", data=place / "data")
    for backend, steps in (("sglang", options.sglang_steps), ("hf", options.steps - options.sglang_steps)):
        if not steps:
            continue
        disk = place / f"disk_{backend}"
        disk.mkdir()
        if not (is_alone and mounted(disk, DISK_MB)):
            print("no tmpfs can be mounted here: the disk is never full, and shared memory is not looked at")
        soak = Soak(place, disk if is_alone else None, backend, steps, options.every, options.seed)
        soak.run_straight()
        soak.run_disturbed()
        failures += [f"{backend}: {text}" for text in soak.compare()]
        print(soak.summary(), flush=True)
    failures += [f"shared memory is left: {name}" for name in os.listdir("/dev/shm") if is_alone]
    print("\n".join(failures) or f"soak: {options.steps} steps, all as undisturbed, nothing left (logs: {place})", flush=True)
    sys.exit(bool(failures))


if __name__ == "__main__":
    main()
