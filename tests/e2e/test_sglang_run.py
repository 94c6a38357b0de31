"""The whole program with SGLang: a run of 6 steps on two ranks (actor TP=2, two engines), disturbed, exported and measured.

Invariant 4: whatever is killed, the final weights are bitwise those of the undisturbed run. Starting two engines takes half a minute on two
cores, so SGLang's run loses each kind of process once, and the hf backend's is killed more often. More of it: tests/programs/soak.py.
"""

from __future__ import annotations

import json
import random
import time
from pathlib import Path

import pytest
import torch

from tests.e2e.program import EVALUATE, TRAIN, Program, describe, last_step, metrics, run, samples, status, write_config
from tests.ranks import PROGRAMS
from tools.make_tiny_model import make

pytestmark = pytest.mark.timeout(580)
STEPS = 6


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("made")
    make(folder / "model", data=folder / "data")
    return folder


def config(made: Path, name: str, backend: str) -> tuple[list[str], Path]:
    """Command-line arguments and the run directory. Reward and advantage are functions in a file.

    With the hf backend more groups are drawn than a step needs, and those left over wait for the next: part of what a checkpoint holds.
    """
    kept = {"dynamic": {"rounds": 3, "factor": 1.5, "surplus": "keep"}} if backend == "hf" else {}
    path = write_config(
        made / f"{name}.yaml", made,
        run={"steps": STEPS, "save_every": 1, "export_hf": True, "keep_best": 1, "best_metric": "reward/mean"},
        data={"eval": [{"path": str(made / "data" / "eval.jsonl"), "name": "held_out", "limit": 12}]},
        rollout={"backend": backend},
        algo={"advantage": f"{PROGRAMS / 'rewards.py'}:centred"} | kept,
        eval={"before": False},
    )  # fmt: skip
    return ["--config", path], made / "runs" / name


@pytest.fixture(scope="module")
def straight(made: Path) -> Path:
    """The undisturbed run with SGLang."""
    arguments, directory = config(made, "straight", "sglang")
    code, output = run(made, 2, TRAIN, *arguments, timeout=250)
    assert code == 0, output[-5000:]
    return directory


def test_every_step_is_proven_and_the_engines_logprobs_are_the_trainers(straight: Path) -> None:
    """Tolerance of the mean |difference| of log-probabilities: 1e-5, fp32 (measured: 6e-7 at most)."""
    lines = metrics(straight)
    assert [m["step"] for m in lines] == list(range(1, STEPS + 1))
    assert [m["sync/version"] for m in lines] == list(range(STEPS))
    assert all(m["sync/proof"] == 1 and m["sync/bytes"] > 0 for m in lines)
    assert all(m["mismatch/logp_abs_diff"] < 1e-5 for m in lines)
    assert all(m["train/grad_norm"] > 0 and m["train/skipped"] == 0 for m in lines)
    assert status(straight) | {"state": "done", "exit_code": 0, "step": STEPS, "checkpoint": STEPS} == status(straight)


def test_the_checkpoint_of_the_best_step_is_kept_besides_the_last_two(straight: Path) -> None:
    rewards = {line["step"]: line["reward/mean"] for line in metrics(straight)}
    best = max(rewards, key=lambda step: (rewards[step], -step))
    assert sorted(p.name for p in (straight / "checkpoints").iterdir()) == [f"step_{s:06d}" for s in sorted({best, STEPS - 1, STEPS})]
    found = status(straight)["best"]
    assert (found["step"], found["value"]) == (best, rewards[best]) and Path(found["path"]).is_dir()
    written = [line["save/write_s"] for line in metrics(straight) if "save/write_s" in line]
    assert len(written) >= STEPS - 2 and all(line["save/wait_s"] >= 0 for line in metrics(straight)[1:])


def test_reward_and_advantage_from_a_file_are_used(straight: Path) -> None:
    for step in samples(straight).values():
        rewards = [s["reward"] for s in step]
        mean = sum(rewards) / len(rewards)
        assert len(step) == 16 and max(rewards) > 0
        for s in step:
            text = s["response"]
            assert s["reward"] == pytest.approx(sum(c.isdigit() for c in text) / max(len(text), 1), abs=1e-12)
            assert s["advantage"] == pytest.approx(2 * (s["reward"] - mean), abs=1e-9)


def finish(program: Program, directory: Path) -> None:
    assert program.wait(250) == 0, program.output[-5000:]
    assert status(directory)["state"] == "done"


def assert_same(disturbed: Path, straight: Path, *but: str) -> None:
    """Weights bitwise, samples, and all metrics that are not measured with a clock, except those that begin with `but`."""
    assert (disturbed / "hf/model.safetensors").read_bytes() == (straight / "hf/model.safetensors").read_bytes()
    assert samples(disturbed) == samples(straight)
    assert {name: value for name, value in status(disturbed)["best"].items() if name != "path"} == {
        name: value for name, value in status(straight)["best"].items() if name != "path"
    }
    assert [m["step"] for m in metrics(disturbed)] == [m["step"] for m in metrics(straight)]
    timed = ("time", "mem/", "perf/", "save/", "sync/seconds", "sync/copy_ms", "sync/proof_ms", "sync/gb_per_s", "rollout/tokens_per_s")
    measured = (*timed, *but)
    for mine, its in zip(metrics(disturbed), metrics(straight), strict=True):
        assert {k: v for k, v in mine.items() if not k.startswith(measured)} == {k: v for k, v in its.items() if not k.startswith(measured)}


def kill_while_starting(made: Path, arguments: list[str], seconds: float) -> None:
    with Program(made / "life.log", 2, TRAIN, *arguments) as life:
        time.sleep(seconds)
        assert life.process.poll() is None, life.output[-5000:]
        left = life.kill_9()
        assert not left, f"10 s after the ranks were killed there are still {describe(left)}"


def kill_after_step(made: Path, arguments: list[str], directory: Path, step: int, seconds: float) -> None:
    """`seconds` after the step's metrics were written: in its save, or in the step after it."""
    with Program(made / "life.log", 2, TRAIN, *arguments) as life:
        life.wait_until(lambda: last_step(directory) >= step, 200, f"step {step}")
        time.sleep(seconds)
        assert life.process.poll() is None, "it was done before it could be killed"
        left = life.kill_9()
        assert not left, f"10 s after the ranks were killed there are still {describe(left)}"


def test_sglang_run_that_loses_engines_and_a_rank_ends_bitwise_as_the_undisturbed_one(made: Path, straight: Path) -> None:
    """An engine is killed and one hangs: they are started anew. Then a rank is killed: torchrun starts all of them again, and the run goes
    on from its last checkpoint. Everything that the lost ranks had started ends by itself.

    `mismatch/` is left out: which requests SGLang decodes together depends on when they reach it, and with it the last bits of the
    log-probabilities that it reports. Training uses its own.
    """
    arguments, directory = config(made, "lossy", "sglang")
    with Program(made / "lossy.log", 2, TRAIN, *arguments, "rollout.timeout_s=20", restarts=1) as life:
        life.wait_until(lambda: last_step(directory) >= 1, 200, "step 1")
        life.engines()[0].kill()
        life.wait_until(lambda: life.output.count("the engine is back") == 1, 250, "another engine")
        life.wait_until(lambda: last_step(directory) >= 3, 120, "step 3")
        life.schedulers()[1].suspend()
        life.wait_until(lambda: life.output.count("the engine is back") == 2, 250, "another engine")
        engines = [*life.engines(), *life.schedulers()]
        life.ranks()[1].kill()
        finish(life, directory)
        assert not any(p.is_running() for p in engines)
        assert "exit code -9" in life.output and "hangs: " in life.output
    left = life.family()
    assert not left, describe(left)
    assert_same(directory, straight, "mismatch/", "rollout/engine_restarts", "rollout/restart_s")


@pytest.mark.extra
@pytest.mark.parametrize("way", ["rollout.tp=2", "sync.transport=buckets"])
def test_an_engine_of_two_ranks_and_one_that_gets_buckets_are_replaced_too(made: Path, way: str) -> None:
    """A scheduler of the engine is killed; in the next step but one it hangs. Both ranks' work is generated again."""
    name = way.split(".")[0]
    settings = [way, "run.steps=4", "rollout.timeout_s=8", f"parallel.tp={1 if name == 'sync' else 2}"]
    arguments, whole = config(made, f"whole_{name}", "sglang")
    code, output = run(made, 2, TRAIN, *arguments, *settings, timeout=250)
    assert code == 0, output[-5000:]
    arguments, directory = config(made, f"lost_{name}", "sglang")
    with Program(made / "lost.log", 2, TRAIN, *arguments, *settings) as life:
        life.wait_until(lambda: last_step(directory) >= 1, 200, "step 1")
        life.schedulers()[-1].kill()
        life.wait_until(lambda: life.output.count("the engine is back") == 1, 250, "another engine")
        life.wait_until(lambda: last_step(directory) >= 2, 120, "step 2")
        life.schedulers()[0].suspend()
        life.wait_until(lambda: life.output.count("the engine is back") == 2, 250, "another engine")
        finish(life, directory)
    left = life.family()
    assert not left, describe(left)
    assert_same(directory, whole, "mismatch/", "rollout/engine_restarts", "rollout/restart_s")


def test_run_killed_again_and_again_ends_bitwise_as_the_undisturbed_one(made: Path) -> None:
    """With its launcher, and then without: torchrun's --max-restarts."""
    rng = random.Random(5)
    arguments, undisturbed = config(made, "straight_hf", "hf")
    code, output = run(made, 2, TRAIN, *arguments)
    assert code == 0, output[-5000:]
    arguments, directory = config(made, "killed", "hf")
    kill_while_starting(made, arguments, rng.uniform(1, 8))
    kill_after_step(made, arguments, directory, 1, rng.uniform(0, 1.0))
    with Program(made / "last.log", 2, TRAIN, *arguments, restarts=2) as last:
        for rank, step in enumerate((2, 4)):
            starts = rank + 1
            last.wait_until(lambda n=starts: last.output.count("everything it writes is in") == n, 120, f"start {starts}")
            last.wait_until(lambda step=step: last_step(directory) >= step, 60, f"step {step}")
            last.ranks()[rank].kill()
        finish(last, directory)
        assert last.output.count("resuming from") >= 2
    assert_same(directory, undisturbed)


@pytest.fixture(scope="module")
def measured(made: Path, straight: Path) -> dict[str, Path]:
    """launch/evaluate.py on one rank: the exported folder with SGLang, the last checkpoint (saved by two ranks) with the hf backend."""
    arguments, _ = config(made, "straight", "sglang")
    wanted = {
        "exported": [f"model.path={straight}/hf", "run.resume=never"],
        "checkpoint": [f"run.resume={straight}/checkpoints/step_{STEPS:06d}", "rollout.backend=hf"],
    }
    for name, extra in wanted.items():
        code, output = run(made, 1, EVALUATE, *arguments, f"run.name={name}", "parallel.tp=1", *extra, timeout=200)
        assert code == 0, output[-5000:]
        assert f"written: {made}/runs/{name}/eval.json" in output
    return {name: made / "runs" / name for name in wanted}


def test_exported_folder_gives_the_same_greedy_answers_in_transformers_and_sglang(straight: Path, measured: dict[str, Path]) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(straight / "hf")
    model = AutoModelForCausalLM.from_pretrained(straight / "hf", dtype=torch.float32)
    answers = samples(measured["exported"])["eval_held_out.jsonl"]
    assert len(answers) == 12
    for s in answers:
        prompt = tokenizer(s["prompt"], return_tensors="pt", add_special_tokens=False)
        tokens = model.generate(**prompt, max_new_tokens=6, do_sample=False)[0, prompt.input_ids.shape[1] :]
        assert s["response"] == tokenizer.decode(tokens, skip_special_tokens=True)
        assert (s["prompt_tokens"], s["response_tokens"]) == (prompt.input_ids.shape[1], len(tokens))


def test_measuring_the_last_checkpoint_or_the_export_gives_what_the_run_logged(straight: Path, measured: dict[str, Path]) -> None:
    logged = metrics(straight)[-1]["eval/held_out/accuracy"]
    for name, step in (("exported", 0), ("checkpoint", STEPS)):
        found = json.loads((measured[name] / "eval.json").read_text())
        assert found["step"] == step
        assert found["sets"]["held_out"] | {"accuracy": logged, "prompts": 12} == found["sets"]["held_out"]
