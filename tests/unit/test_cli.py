"""The command line: quick answers without torch, each kind of end with its code, one message and no traceback."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from megaflow import cli
from megaflow.plan import preflight
from megaflow.types import DivergedError, PreflightError

# torch's error handler wants a real stderr for its fault handler, and pytest has put its own there
pytestmark = pytest.mark.filterwarnings("ignore:Unable to enable fault handler")
ROOT = Path(__file__).parents[2]
SOUND = "model: {path: m}\ndata: {train: [{path: t.jsonl}]}\nreward: {functions: [{name: exact}]}\n"
TORCHRUN = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """`run(*arguments, train=...)` in an empty folder with a sound x.yaml -> (exit code, stdout, stderr). Preflight passes."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    Path("x.yaml").write_text(SOUND)
    monkeypatch.setattr(preflight, "check", lambda loaded, world_size, checks: [f"a fact about {world_size} ranks"])
    monkeypatch.setattr(cli, "SECONDS_FOR_RANK_0", 0.01)
    for name in TORCHRUN:
        monkeypatch.setenv(name, "")  # so that what the command line sets is taken back
        monkeypatch.delenv(name)

    def main(*arguments: str, train: str = "never_imported:train", purpose: str = "train") -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["train_grpo.py", *arguments])
        try:
            cli.main(train, "What it does.", purpose)
            code = 0
        except SystemExit as exit:
            code = exit.code
        out, err = capsys.readouterr()
        assert "Traceback" not in err
        return code, out, err

    return main


def trainer(name: str, body: str) -> str:
    Path(f"{name}.py").write_text(f"import os, sys\nfrom megaflow.types import *\ndef train(config):\n    {body}\n")
    return f"{name}:train"


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        (["--config", "y.yaml"], ["y.yaml: cannot be read: No such file or directory (did you mean 'x.yaml'?)"]),
        (["--config", "x.yaml", "actor.lrr=1"], ["argument actor.lrr=1: actor.lrr is not a key (did you mean 'lr'?)"]),
        (["--config", "x.yaml", "parallel.tp=2"], ["argument parallel.tp=2: ", "does not divide the 1 rank(s)"]),
        (["--config", "x.yaml", "nonsense"], ["argument nonsense: an override has the form section.key=value"]),
        ([], ["model.path is not set", "data.train is empty", "reward.functions is empty"]),
        (["--config"], ["command line: argument --config: expected one argument; see --help"]),
        (["--confg", "x.yaml"], ["command line: unrecognized arguments: --confg"]),
        (["--config", "x.yaml", "--world-size", "2"], ["--world-size goes with --dry-run or --print-config"]),
        (["--config", "x.yaml", "--world-size", "0", "--dry-run"], ["--world-size 0 must be at least 1"]),
        (["--config", "x.yaml", "--world-size", "two", "--dry-run"], ["invalid int value: 'two'"]),
    ],
)
def test_configuration_errors_end_with_2(run: Run, arguments: list[str], parts: list[str]) -> None:
    code, out, err = run(*arguments)
    assert (code, out) == (2, "")
    assert all(part in err for part in parts), err


def test_nothing_is_written_when_the_configuration_is_wrong(run: Run) -> None:
    run("--config", "x.yaml", "actor.lr=x")
    assert sorted(os.listdir(".")) == ["x.yaml"]


def test_options_and_overrides_mix(run: Run) -> None:
    code, out, _ = run("actor.lr=1", "--config", "x.yaml", "run.steps=7", "--print-config", "sampling.top_k=-1")
    assert code == 0
    assert "lr: 1.0  # argument actor.lr=1" in out and "steps: 7  # argument run.steps=7" in out and "path: m  # x.yaml:1" in out


def test_print_config_shows_a_contradictory_one_too(run: Run) -> None:
    code, out, err = run("--config", "x.yaml", "--print-config", "parallel.tp=2")
    assert code == 2 and "tp: 2  # argument" in out and "does not divide" in err
    assert run("--config", "x.yaml", "--print-config", "parallel.tp=2", "--world-size", "4")[0] == 0


def test_dry_run_prints_ledger_and_facts_and_starts_nothing(run: Run) -> None:
    code, out, err = run("--config", "x.yaml", "--dry-run", "--world-size", "4", "parallel.tp=2")
    assert (code, err) == (0, "")
    assert "4 = tp 2 x pp 1 x dp 2" in out and "256 = 32 x 8" in out and "  a fact about 4 ranks" in out and "nothing was started" in out


def test_preflight_errors_end_with_3(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(loaded: object, world_size: int, checks: object) -> list[str]:
        raise PreflightError("x.yaml:1: the disk is full")

    monkeypatch.setattr(preflight, "check", refuse)
    for arguments in (["--dry-run"], []):
        assert run("--config", "x.yaml", *arguments) == (3, "", "x.yaml:1: the disk is full\n")


def test_another_host_tells_what_only_it_lacks(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(loaded: object, world_size: int, checks: object) -> list[str]:
        raise PreflightError("x.yaml:1: no such folder")

    monkeypatch.setattr(preflight, "check", refuse)
    for name, value in {"RANK": "8", "LOCAL_RANK": "0", "WORLD_SIZE": "16", "LOCAL_WORLD_SIZE": "8"}.items():
        monkeypatch.setenv(name, value)
    assert run("--config", "x.yaml") == (3, "", "rank 8: x.yaml:1: no such folder\n")


def test_other_ranks_are_silent_about_what_all_ranks_see(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("LOCAL_RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert run("--config", "x.yaml", "actor.lr=x") == (2, "", "")
    assert run("--config", "x.yaml", "--print-config") == (0, "", "")
    assert run("--config", "x.yaml", "--dry-run") == (0, "", "")
    assert run("--help") == (0, "", "")


def test_evaluation_has_its_own_checks(run: Run) -> None:
    code, _, err = run("--config", "x.yaml", purpose="evaluate")
    assert code == 2 and "there is nothing to evaluate on" in err


@pytest.mark.parametrize("purpose", ["evaluate", "generate"])
def test_what_does_not_train_has_no_plan(run: Run, purpose: str) -> None:
    code, out, err = run("--config", "x.yaml", "--plan", purpose=purpose)
    assert (code, out) == (2, "") and "--plan is of the steps of a training run" in err and "launch/train_grpo.py" in err
    _, its_help, _ = run("--help", purpose=purpose)
    assert "--plan" not in its_help and "--device" not in its_help and "--world-size" in its_help
    assert "--plan " in run("--help", purpose="offline")[1]


def test_an_engine_larger_than_the_hosts_of_a_plan_is_refused(run: Run) -> None:
    """Hosts of 8 ranks, as the plan takes them; a check alone knows of none."""
    sizes = ["--config", "x.yaml", "--world-size", "16", "rollout.tp=16"]
    code, _, err = run(*sizes, "--plan")
    assert code == 2 and "rollout.tp=16: an engine lives on one host, and a host has 8 ranks; use 1, 2, 4 or 8" in err
    assert run(*sizes, "--dry-run")[0] == 0


@pytest.mark.parametrize(
    ("body", "code", "message"),
    [
        ("return None", 0, ""),
        ("raise ConfigError('x.yaml:1: wrong')", 2, "x.yaml:1: wrong\n"),
        ("raise PreflightError('does not fit')", 3, "does not fit\n"),
        ("raise DivergedError('step 7: 3 steps without finite gradients')", 4, "step 7: 3 steps without finite gradients\n"),
        ("sys.exit(75)", 75, ""),
    ],
)
def test_the_end_of_training_is_the_exit_code(run: Run, body: str, code: int, message: str) -> None:
    ended, _, err = run("--config", "x.yaml", train=trainer(f"ends_{code}", body))
    assert (ended, err) == (code, message)


def test_a_crash_keeps_its_exception(run: Run) -> None:
    with pytest.raises(ZeroDivisionError):
        run("--config", "x.yaml", train=trainer("crashes", "1 / 0"))


def test_an_error_of_one_rank_alone_is_told_by_it(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "3")
    monkeypatch.setenv("WORLD_SIZE", "4")
    code, _, err = run("--config", "x.yaml", train=trainer("fails_alone", "raise PreflightError('no such file here')"))
    assert (code, err) == (3, "rank 3: no such file here\n")
    assert DivergedError.exit_code == 4


@pytest.mark.parametrize(
    ("script", "arguments", "code", "answer"),
    [
        ("train_grpo.py", ["--help"], 0, "samples_per_prompt: int >= 1 = 8"),
        ("evaluate.py", ["--help"], 0, "without training"),
        ("train_grpo.py", ["--config", "x.yaml", "--print-config"], 0, "path: m  # x.yaml:1"),
        ("train_grpo.py", ["--config", "x.yaml", "actor.lr=x"], 2, "argument actor.lr=x"),
        ("train_grpo.py", ["--config", "x.yaml", "parallel.tp=2"], 2, "does not divide"),
    ],
)
def test_quick_answers_load_no_torch(tmp_path: Path, script: str, arguments: list[str], code: int, answer: str) -> None:
    (tmp_path / "x.yaml").write_text(SOUND)
    heavy = ("torch", "numpy", "transformers", "megatron", "sglang", "pandas")
    program = (
        "import runpy, sys\n"
        f"sys.argv = [{script!r}, *{arguments!r}]\n"
        "try:\n"
        f"    runpy.run_path({str(ROOT / 'launch' / script)!r}, run_name='__main__'); code = 0\n"
        "except SystemExit as e:\n"
        "    code = e.code\n"
        f"print('ENDED', code, [m for m in {heavy!r} if m in sys.modules])\n"
    )
    environment = {name: value for name, value in os.environ.items() if name not in TORCHRUN} | {"PYTHONPATH": str(ROOT)}
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run([sys.executable, "-c", program], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=60)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert done.stdout.splitlines()[-1:] == [f"ENDED {code} []"], done.stderr
    assert answer in done.stdout + done.stderr
    # processor time, which another job on the machine does not lengthen
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < 1.0


def test_help_into_a_closed_pipe_is_quiet() -> None:
    command = f"{sys.executable} {ROOT}/launch/train_grpo.py --help | true"
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(["bash", "-c", f"set -o pipefail; {command}"], env=environment, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")


def test_launch_scripts_do_nothing_when_imported(capsys: pytest.CaptureFixture[str]) -> None:
    import runpy

    for script in ("train_grpo.py", "evaluate.py"):
        runpy.run_path(str(ROOT / "launch" / script), run_name="imported")
    assert capsys.readouterr().out == ""


def test_under_torchrun_a_configuration_error_is_told_once_and_ends_all_ranks(tmp_path: Path) -> None:
    (tmp_path / "x.yaml").write_text(SOUND)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(ROOT / "launch/train_grpo.py")]
    environment = {name: value for name, value in os.environ.items() if name not in TORCHRUN}
    environment |= {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    began = time.monotonic()
    command += ["--config", "x.yaml", "actor.lrr=1"]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1, "torchrun's own code for any failure"
    assert done.stderr.count("argument actor.lrr=1: actor.lrr is not a key") == 1, done.stderr
    assert "exitcode  : 2" in done.stderr or "exitcode: 2" in done.stderr, done.stderr
    assert time.monotonic() - began < 30
