"""Every command of README and docs/ is run: here if it is cheap, else by the test that is named below, or it says what it needs.

A block whose commands want more than two CPU cores and a few minutes begins with `# needs: 1 GPU` or the like. Those are checked as far as
that goes without: options, files, and the configuration with all its rules.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import runpy
import shutil
import subprocess
import sys
from pathlib import Path
from unittest import mock

import pytest
import yaml

from megaflow.cli import _options
from megaflow.config.checks import check
from megaflow.config.loading import load
from tests.pages import PAGES, ROOT, marked_commands, name_of
from tests.unit.test_report import run_dir

# What takes too long here, and the test that runs it. Launch scripts are also run here as far as --dry-run goes, with the page's arguments.
LONG = {
    "launch/train_grpo.py": "tests/e2e/test_sglang_run.py::test_every_step_is_proven_and_the_engines_logprobs_are_the_trainers",
    "launch/train_ppo.py": "tests/e2e/test_ppo.py::test_kill_9_and_resume_is_bitwise_and_the_critic_learns",
    "launch/train_offline.py": "tests/e2e/test_offline_run.py::test_dpo_then_online_in_one_run_or_from_a_checkpoint_between",
    "launch/generate.py": "tests/e2e/test_generate.py::test_killed_and_resumed_it_writes_the_same_bytes_and_a_finished_file_is_kept",
    "launch/evaluate.py": "tests/e2e/test_sglang_run.py::test_measuring_the_last_checkpoint_or_the_export_gives_what_the_run_logged",
    "yaml/smollm2_cpu.yaml": "tests/e2e/test_smollm2.py::test_smollm2_converted_trained_under_pp_2_and_exported",
    "tools/make_smollm2.py": "tests/e2e/test_smollm2.py::test_smollm2_converted_trained_under_pp_2_and_exported",
    "tools/make_tiny_model.py": "tests/unit/test_tiny_model.py::test_a_few_steps_of_warm_up_run",
    "tools/doctor.py": "tests/unit/test_doctor.py::test_it_comes_through_here_and_writes_nothing",
    "megatron-to-hf": "tests/dist/test_convert_checkpoint.py::{any}",
    "runs/quickstart/checkpoints/step_000030": "tests/dist/test_convert_checkpoint.py::{any}",
    "verify runs/quickstart": "tests/dist/test_convert_checkpoint.py::{any}",
}
QWEN_7B = dict(
    model_type="qwen2", vocab_size=152064, hidden_size=3584, intermediate_size=18944, num_hidden_layers=28, num_attention_heads=28,
    num_key_value_heads=4, max_position_embeddings=32768, rms_norm_eps=1e-6, rope_theta=1e6, tie_word_embeddings=False,
    hidden_act="silu", torch_dtype="bfloat16",
)  # fmt: skip
PURPOSES = {"train_offline": "offline", "evaluate": "evaluate", "generate": "generate"}
ASKS = ("--help", "--print-config", "--dry-run", "--plan")  # options with which a launch script starts nothing


def script_of(words: list[str]) -> tuple[str, list[str]]:
    """("launch/x.py", its arguments) of `python ...` or `torchrun ...`."""
    index = next(i for i, word in enumerate(words) if word.endswith(".py"))
    return words[index], words[index + 1 :]


def ranks_of(words: list[str]) -> int:
    """How many ranks torchrun's options ask for, over all hosts; or those of a file for sbatch."""
    if words[0] == "sbatch":
        text = (ROOT / next(word for word in words if word.endswith(".sbatch"))).read_text()
        nodes, tasks = (re.search(rf"^#SBATCH --{name}=(\d+)", text, re.M) for name in ("nodes", "ntasks-per-node"))
        given = next((word.removeprefix("--nodes=") for word in words if word.startswith("--nodes=")), nodes[1])
        return int(given) * int(tasks[1])
    counts = [int(words[words.index(o) + 1]) for o in ("--nproc-per-node", "--nnodes") if o in words and words[0].endswith("torchrun")]
    return counts[0] * (counts[1] if len(counts) > 1 else 1) if counts else 1


def covering(words: list[str]) -> str | None:
    """The test of LONG that runs the command; the most special entry counts."""
    line = " ".join(words)
    found = [key for key in LONG if re.search(rf"(^|\s|/){re.escape(key)}(\s|$)", line)]
    return LONG[max(found, key=lambda key: (key.startswith("yaml"), len(key)))] if found else None


def category(needs: str, words: list[str]) -> str:
    """needs, shell, make, run or long; "" for a command that nothing runs."""
    program = words[0].removeprefix(".venv/bin/")
    if needs:
        return "needs"
    if program in ("touch", "export", "cd", "mkdir"):
        return "shell"
    if program in ("make", ".ci/run"):
        return "make"
    if program not in ("python", "torchrun"):
        return ""
    if words[1:2] == ["-m"]:
        return {"megaflow.config.help": "run", "pytest": "make"}.get(words[2], "")  # pytest: what `make test` does
    if script_of(words)[0].startswith("tools/bench/"):
        return ""  # each of them takes minutes
    if any(option in words for option in ASKS):
        return "run"
    return "long" if covering(words) else "run"


EVERY = {(needs, *words): name_of(page) for page in PAGES for needs, words in marked_commands(page)}


def of_category(*wanted: str) -> list[list[str]]:
    return [words for needs, *words in EVERY if category(needs, words) in wanted]


@pytest.fixture(scope="module")
def clone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The repository with what commands of earlier lines have made: models, data, runs."""
    from tools.make_tiny_model import make

    base = tmp_path_factory.mktemp("clone")
    for name in ("launch", "tools", "megaflow", "yaml", "docs", "tests", "setup.py", "Makefile", "requirements"):
        (base / name).symlink_to(ROOT / name)
    make(base / "models/tiny", steps=0, data=base / "data/addition")
    (base / "models/trained").symlink_to(base / "models/tiny")
    (base / "models/Qwen2.5-7B-Instruct").mkdir()
    (base / "models/Qwen2.5-7B-Instruct/config.json").write_text(json.dumps(QWEN_7B))  # all that a plan reads
    (base / "data/generated").mkdir()
    line = json.dumps(dict.fromkeys(("prompt", "response", "chosen", "rejected"), "1"))
    for name in ("addition_sft", "addition_pairs"):
        (base / f"data/generated/{name}.jsonl").write_text(line + "\n")
    for name in ("quickstart", "doubles", "other", "units"):
        run = run_dir(base / "runs" / name, [0.2, 0.3, 0.6], 1e-3)
        settings = yaml.safe_load((run / "config.yaml").read_text()) | {"model": {"path": "models/tiny", "dtype": "float32"}}
        (run / "config.yaml").write_text(yaml.safe_dump(settings))
        (run / "env.json").write_text(json.dumps({"ranks": 1, "devices": {"gpus": []}}))
    return base


def run_here(clone: Path, words: list[str], monkeypatch: pytest.MonkeyPatch, *added: str) -> str:
    """The script within this process, as `python script.py arguments` in the clone; what it printed. Fails if it fails."""
    redirected = words.index(">") if ">" in words else len(words)
    words = words[:redirected]
    monkeypatch.chdir(clone)
    out, code = io.StringIO(), None
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(out), mock.patch.dict(os.environ):
        try:
            if words[1] == "-m":
                monkeypatch.setattr(sys, "argv", words[2:])
                runpy.run_module(words[2], run_name="__main__")
            else:
                script, arguments = script_of(words)
                monkeypatch.setattr(sys, "argv", [script, *arguments, *added])
                runpy.run_path(script, run_name="__main__")
        except SystemExit as end:
            code = end.code
    does_not_fit = "--plan" in words and code == 3 and "does not fit" in out.getvalue()  # an answer too
    assert code in (0, None) or does_not_fit, f"`{' '.join(words)}` ended with {code}:\n{out.getvalue()[-3000:]}"
    return out.getvalue()


UNUSED = ("run.root=unused",)  # in `clone` all runs of the pages are done, and would be refused
# What a command makes that others on the page read: tests run in any order, and on several workers.
MADE_BY = {"models/trained-cut": "python tools/convert.py hf-to-megatron models/trained models/trained-cut tp=2 pp=2".split()}


@pytest.mark.parametrize("words", of_category("run"), ids=" ".join)
def test_it_runs(clone: Path, monkeypatch: pytest.MonkeyPatch, words: list[str]) -> None:
    for made, by in MADE_BY.items():
        if words == by:
            shutil.rmtree(clone / made, ignore_errors=True)
        elif made in words and not (clone / made).exists():
            run_here(clone, by, monkeypatch)
    run_here(clone, words, monkeypatch, *(UNUSED if "--dry-run" in words else ()))


@pytest.mark.parametrize("made", MADE_BY)
def test_what_others_read_is_made_by_a_command_of_the_pages(made: str) -> None:
    assert MADE_BY[made] in of_category("run")


@pytest.mark.parametrize("words", [w for w in of_category("long") if script_of(w)[0].startswith("launch/")], ids=" ".join)
def test_it_could_start(clone: Path, monkeypatch: pytest.MonkeyPatch, words: list[str]) -> None:
    """All that can be checked without allocating; models that are not there are left out of it, and checkpoints."""
    _, arguments = script_of(words)
    words = [word for word in words if not word.startswith("run.resume=")]
    options = _options(arguments)
    is_there = Path(clone / load(str(ROOT / options.config), options.overrides).config.model.path).exists()
    added = ("--dry-run" if is_there else "--print-config", "--world-size", str(ranks_of(words)))
    run_here(clone, words, monkeypatch, *added, *UNUSED)


@pytest.mark.parametrize("words", of_category("needs"), ids=" ".join)
def test_what_needs_more_is_sound_as_far_as_that_goes(words: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    script = next((word for word in words if word.startswith("launch/")), "")
    arguments = words[words.index(script) + 1 :] if script else []
    if "--config" in arguments:
        options = _options([word for word in arguments if not word.endswith(".txt")])
        loaded = load(options.config, options.overrides)
        world = ranks_of(words) if words[0].endswith(("torchrun", "sbatch")) else 8
        check(loaded, world, purpose=PURPOSES.get(Path(script).stem, "train"))


def test_make_targets(clone: Path) -> None:
    for words in of_category("make"):
        if words[0] == "make":
            done = subprocess.run([*words, "-n"], cwd=ROOT, env=dict(os.environ, MAKEFLAGS=""), capture_output=True, text=True, timeout=30)
            assert done.returncode == 0, done.stderr


def test_every_command_has_a_category_and_every_test_that_is_named_exists() -> None:
    counts: dict[str, int] = {}
    for (needs, *words), page in EVERY.items():
        kind = category(needs, words)
        assert kind, f"{page}: no test runs `{' '.join(words)}`: begin its block with `# needs: ...`, e.g. `# needs: 1 GPU`"
        counts[kind] = counts.get(kind, 0) + 1
    assert counts["run"] >= 20 and counts["long"] >= 15 and counts["needs"] >= 20, counts
    for test in LONG.values():
        file, _, name = test.partition("::")
        text = (ROOT / file).read_text()
        assert "def test_" in text if name == "{any}" else f"def {name}(" in text, f"{test} is gone"


def test_a_command_that_nothing_runs_has_no_category() -> None:
    assert category("", ["sbatch", "x.sbatch"]) == category("", ["python", "tools/bench/step.py", "models/x"]) == ""
    assert category("Slurm", ["sbatch", "x.sbatch"]) == "needs"


def test_a_command_that_fails_is_found(clone: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lines = {"ended with 2:\n  runs/none": ["python", "tools/view_samples.py", "runs/none"], "none.py": ["python", "tools/none.py"]}
    for reason, line in lines.items():
        with pytest.raises((AssertionError, FileNotFoundError), match=re.escape(reason)):
            run_here(clone, line, monkeypatch)
