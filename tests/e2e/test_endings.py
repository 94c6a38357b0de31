"""How runs of the real command end: stopped, failed, diverged, refused; what they say, and what they leave behind.

With the hf backend, which starts at once; test_sglang_run.py holds what concerns the engine.
"""

from __future__ import annotations

import json
import signal
import subprocess
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from tests.e2e.program import TRAIN, Program, files, last_step, metrics, run, samples, status, write_config
from tests.ranks import PROGRAMS
from tools.make_tiny_model import make

pytestmark = pytest.mark.timeout(400)


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("made")
    make(folder / "model", data=folder / "data")
    make(folder / "other", seed=1)
    return folder


def test_stop_file_and_sigterm_save_and_the_same_command_goes_on(made: Path, tmp_path: Path) -> None:
    """One run of two ranks with two interruptions, then what is said to those who use its directory wrongly."""
    config = write_config(tmp_path / "stops.yaml", made, run={"steps": 4000, "save_every": 0})
    directory = tmp_path / "runs" / "stops"
    with Program(tmp_path / "first.log", 2, TRAIN, "--config", config) as first:
        first.wait_until(lambda: last_step(directory) >= 2, 120, "step 2")
        (directory / "STOP").touch()
        assert first.wait(30) != 0
    stopped_at = stopped(directory, f"found {directory}/STOP")
    assert not (directory / "STOP").exists() and "the same command goes on" in first.output

    with Program(tmp_path / "second.log", 2, TRAIN, "--config", config) as second:
        second.wait_until(lambda: last_step(directory) > stopped_at, 120, "another step")
        second.process.send_signal(signal.SIGTERM)  # to torchrun, which passes it on and kills after 30 s
        began = time.monotonic()
        assert second.wait(29) != 0
        assert time.monotonic() - began < 29
    assert f"resuming from {directory}/checkpoints/step_{stopped_at:06d} (step {stopped_at})" in second.output
    again = stopped(directory, "SIGTERM")
    assert again > stopped_at
    assert [m["step"] for m in metrics(directory)] == list(range(again + 1))

    one = ["--config", config, "parallel.tp=1"]  # without torchrun the exit code is the true one
    before = files(directory)
    refused = {
        "run.resume=never": f"{directory} is already used by a run. Ways out:",
        f"model.path={made / 'other'}": f"model.path: {made / 'model'} -> {made / 'other'}",
    }
    for argument, message in refused.items():
        code, output = run(tmp_path, 1, TRAIN, *one, argument)
        assert code == 2 and message in output and "Traceback" not in output, (argument, code, output[-2000:])
    assert files(directory) == {**before, ".lock": files(directory)[".lock"]}


def stopped(directory: Path, reason: str) -> int:
    """The step at which it stopped, saved."""
    found = status(directory)
    assert (found["state"], found["exit_code"], found["message"]) == ("stopped", 75, reason), found
    assert found["checkpoint"] == found["step"] == last_step(directory)
    assert (directory / "checkpoints" / f"step_{found['step']:06d}" / "manifest.json").exists()
    return found["step"]


def test_one_rank_without_torchrun_then_a_loss_that_turns_nan_diverges_and_costs_no_checkpoint(made: Path, tmp_path: Path) -> None:
    """Two optimizer steps a step and max_skipped=3: the second step with the bad loss diverges; a good loss goes on from the checkpoint."""
    config = write_config(tmp_path / "one.yaml", made, parallel={"tp": 1}, run={"steps": 2})
    directory = tmp_path / "runs" / "one"
    code, output = run(tmp_path, 1, TRAIN, "--config", config)
    assert code == 0, output[-3000:]
    assert status(directory)["state"] == "done" and (directory / "checkpoints" / "step_000002").is_dir()
    saved = files(directory / "checkpoints")

    longer = ["--config", config, "run.steps=6", "run.save_every=10"]
    code, output = run(tmp_path, 1, TRAIN, *longer, f"algo.loss={PROGRAMS / 'rewards.py'}:nan_loss")
    assert code == 4, output[-3000:]
    found = status(directory)
    assert (found["state"], found["exit_code"], found["step"], found["checkpoint"]) == ("diverged", 4, 3, 2), found
    assert "3 optimizer steps in a row had a gradient norm of nan" in found["message"] and found["message"] in output
    assert "Traceback" not in output
    assert metrics(directory)[-1] | {"step": 3, "train/skipped": 2.0, "train/optimizer_steps": 2.0} == metrics(directory)[-1]
    assert files(directory / "checkpoints") == saved

    code, output = run(tmp_path, 1, TRAIN, *longer, "run.steps=3")
    assert code == 0 and status(directory)["state"] == "done", output[-3000:]
    assert metrics(directory)[-1]["train/skipped"] == 0 and [m["step"] for m in metrics(directory)] == [0, 1, 2, 3]


def test_rewards_that_all_fail_end_the_run_with_the_functions_own_error(made: Path, tmp_path: Path) -> None:
    functions = {"functions": [{"name": f"{PROGRAMS / 'rewards.py'}:fails"}]}
    config = write_config(tmp_path / "fails.yaml", made, reward=functions)
    code, output = run(tmp_path, 2, TRAIN, "--config", config)
    found = status(tmp_path / "runs" / "fails")
    assert code != 0 and (found["state"], found["exit_code"]) == ("crashed", 1)
    for text in (found["message"], output):
        assert "all 16 rewards failed (16 error)" in text and "RuntimeError: the answer book is closed" in text
    assert time.time() - found["updated"] < 15


def test_an_error_of_rank_1_in_the_middle_of_a_step_ends_the_run_with_its_message(made: Path, tmp_path: Path) -> None:
    """While rank 0 waits in a collective of the same phase; the backend is one of a user's own."""
    backend = {"backend": f"{PROGRAMS / 'faulty.py'}:rollout"}
    config = write_config(tmp_path / "faulty.yaml", made, rollout=backend)
    with Program(tmp_path / "log", 2, TRAIN, "--config", config) as program:
        assert program.wait(120) != 0
        seconds = time.time() - float((tmp_path / "runs" / "failed_at").read_text())
        assert seconds < 20
        output = program.output
    found = status(tmp_path / "runs" / "faulty")
    assert (found["state"], found["exit_code"], found["step"]) == ("crashed", 1, 1), found
    assert found["message"] == "rank 1: ArithmeticError: a stray cosmic ray"
    assert found["message"] in output


def test_a_stopped_rank_ends_the_run_and_costs_no_checkpoint(made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 1 gets SIGSTOP in the loss of step 3; rank 0 finds out, writes the stack of rank 1, and ends it; code 6."""
    monkeypatch.setenv("STOPPED_AT", str(tmp_path / "stopped_at"))
    loss = {"loss": f"{PROGRAMS / 'stops.py'}:stopping_loss"}
    limits = {"first_factor": 1.0, "phases": {"update": 2.0}}
    config = write_config(tmp_path / "still.yaml", made, run={"save_every": 1, "steps": 4}, algo=loss, watchdog=limits)
    directory = tmp_path / "runs" / "still"
    with Program(tmp_path / "log", 2, TRAIN, "--config", config) as program:
        program.wait_until(lambda: (tmp_path / "stopped_at").exists(), 200, "the stop")
        saved = files(directory / "checkpoints" / "step_000001")
        seconds = program.seconds_to_its_end(tmp_path / "stopped_at", 60)
        output = program.output
    found = status(directory)
    print(f"{seconds:.1f} s after the stop: {found['message']}")
    assert (found["state"], found["exit_code"], found["step"], last_step(directory)) == ("stalled", 6, 2, 2)
    for text in ("rank 0 waits in ", "(`update: ", "for rank 1. Rank 1 is in `update: micro-batch ", "and does not answer: T (stopped)"):
        assert text in found["message"]
    assert found["message"].partition("; see")[0].removeprefix("stalled: ") in output
    assert seconds < 30
    assert output.count("the run has stalled") == 1 and "in stopping_loss" in output.partition("--- rank 1")[2]
    folder = next(directory.glob("stall-*"))
    assert "in stopping_loss" in (folder / "rank1.txt").read_text()
    assert "megaflow.rewards.worker" in (folder / "rank0.txt").read_text(), "its children are listed"
    assert found["checkpoint"] >= 1 and "manifest.json" in saved and files(directory / "checkpoints" / "step_000001") == saved


def mounted(*arguments: str | Path) -> None:
    subprocess.run(["mount", *arguments], check=True, capture_output=True)


@pytest.fixture
def share(tmp_path: Path) -> Iterator[tuple[Path, Path]]:
    """(a file system of its own, where it is mounted a second time)."""
    disk, place = tmp_path / "disk", tmp_path / "runs"
    disk.mkdir()
    place.mkdir()
    try:
        mounted("-t", "tmpfs", "-o", "size=200m", "none", disk)
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("this user cannot mount a file system")
    mounted("--bind", disk, place)
    yield disk, place
    for path in (place, disk):
        subprocess.run(["umount", "-l", path], check=False, capture_output=True)


def test_a_file_system_that_goes_and_comes_back_costs_nothing(made: Path, tmp_path: Path, share: tuple[Path, Path]) -> None:
    """Unmounted under a run that writes checkpoints beside its steps, and mounted again 4 s later."""
    disk, place = share
    config = write_config(tmp_path / "away.yaml", made, parallel={"tp": 1}, run={"save_every": 1, "steps": 12})
    directory = place / "away"
    with Program(tmp_path / "log", 1, TRAIN, "--config", config) as program:
        program.wait_until(lambda: (directory / "checkpoints/step_000002/manifest.json").exists(), 200, "a checkpoint")
        subprocess.run(["umount", "-l", place], check=True)
        time.sleep(4.0)
        assert program.process.poll() is None, program.output[-3000:]
        assert list(place.iterdir()) == [], "nothing was written where it was"
        mounted("--bind", disk, place)
        code = program.wait(120)
        output = program.output
    assert code == 0 and ("the run waits for it to pass" in output or "the run tries again every" in output), output[-3000:]
    assert "Traceback" not in output, output[-3000:]
    assert [line["step"] for line in metrics(directory)] == list(range(13))
    assert status(directory)["state"] == "done" and status(directory)["checkpoint"] == 12


class Service:
    """A reward model behind HTTP: the part of a response that is digits, for the first `good` requests; then it is down."""

    def __init__(self, good: int):
        service, self.left = self, good

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                service.left -= 1
                self.send_response(200 if service.left >= 0 else 503)
                self.end_headers()
                scores = [sum(c.isdigit() for c in text) / max(len(text), 1) for text in asked["responses"]]
                self.wfile.write(json.dumps({"scores": scores}).encode())

            def log_message(self, *_: object) -> None:
                return

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=self.server.serve_forever, daemon=True).start()


def test_a_reward_service_that_stays_down_costs_the_step_under_way_and_nothing_else(made: Path, tmp_path: Path) -> None:
    """Saved is the step before, though no checkpoint was due; the same command then ends as the run whose service was never down."""
    service = Service(good=1000)
    model = {"where": "remote", "url": f"http://127.0.0.1:{service.server.server_port}", "retries": 2, "backoff_s": 0.05}
    settings = {"parallel": {"tp": 1}, "run": {"save_every": 0, "export_hf": True}, "reward": {"functions": [], "model": model}}
    straight, lost = (write_config(tmp_path / f"{name}.yaml", made, **settings) for name in ("straight", "lost"))
    code, output = run(tmp_path, 1, TRAIN, "--config", straight)
    assert code == 0, output[-3000:]
    directory = tmp_path / "runs" / "lost"
    service.left = 2  # one request a step
    code, output = run(tmp_path, 1, TRAIN, "--config", lost)
    assert code == 5 and "no answer after 3 tries" in output and "saved step 2" in output and "Traceback" not in output, output[-3000:]
    found = status(directory)
    assert (found["state"], found["exit_code"], found["step"], found["checkpoint"]) == ("lost", 5, 2, 2), found
    service.left = 1000
    code, output = run(tmp_path, 1, TRAIN, "--config", lost)
    assert code == 0 and f"resuming from {directory}/checkpoints/step_000002" in output, output[-3000:]
    undisturbed = tmp_path / "runs" / "straight"
    assert samples(directory) == samples(undisturbed)
    assert (directory / "hf/model.safetensors").read_bytes() == (undisturbed / "hf/model.safetensors").read_bytes()
