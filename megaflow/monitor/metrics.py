"""The one list of metric names, and metrics.jsonl: one strict JSON object a line, each step once, also over kills and resumes."""

from __future__ import annotations

import json
import math
import os
import re
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

# name -> what it is. A part in <...> stands for a name of the run: a reward function, an eval set, a phase, a loss function's own figure.
METRICS = {
    "reward/mean": "mean reward of the step's samples",
    "reward/std": "standard deviation of the rewards over all samples of the step",
    "reward/<fn>": "mean of one reward function, unweighted",
    "reward/failed": "samples whose reward function raised or overran its time, and got reward.failed instead",
    "reward/timeout": "those of reward/failed that overran reward.timeout_s",
    "reward/uniform_groups": "part of the groups whose rewards are all equal: they carry no signal",
    "reward/kl_penalty": "mean over the samples of what the distance to the reference takes off the reward (algo.kl.where=reward)",
    "rollout/len_mean": "mean length of a response, tokens",
    "rollout/len_max": "longest response, tokens",
    "rollout/truncated": "part of the responses that reached sampling.max_new_tokens",
    "rollout/tokens": "tokens generated in the step, all engines",
    "rollout/tokens_per_s": "tokens generated per second of the rollout phase, all engines",
    "batch/tokens": "prompt and response tokens of the step, all ranks",
    "train/loss": "loss, averaged over the step's optimizer steps",
    "train/kl": "k3 of the policy before the update against the policy within it: how far the step has moved; mean over response tokens",
    "train/ref_kl": "KL from the reference model by algo.kl.estimator, mean over response tokens; only with algo.kl.where other than none",
    "train/ratio": "mean ratio of the policy to the policy before the update, over response tokens",
    "train/clip_frac": "part of the response tokens whose ratio was clipped",
    "train/correction_weight": "mean weight that algo.correction gives a response token; only with a mode other than none",
    "train/correction_cut": "part of the response tokens whose weight algo.correction truncated or set to 0",
    "train/entropy": "mean entropy of the policy over response tokens, nats",
    "train/grad_norm": "global gradient norm before clipping, averaged over the step's optimizer steps",
    "train/lr": "learning rate of the step's last optimizer step",
    "train/skipped": "optimizer steps left out because a gradient was not finite",
    "train/optimizer_steps": "optimizer steps made in the step",
    "train/<name>": "whatever else a loss function reports, as the mean over response tokens",
    "mismatch/logp_abs_diff": "mean |engine's logp - trainer's logp| over response tokens, same weights",
    "mismatch/k3": "k3 of the engine's distribution against the trainer's; 0 if they compute the same",
    "mismatch/ratio": "mean of rho = the trainer's probability / the engine's, over response tokens; 1 if they compute the same",
    "mismatch/chi2": "mean of rho^2 - 1, chi2 of the trainer's distribution against the engine's; (mean rho)^2 / (1 + chi2) is the ESS",
    "sync/bytes": "bytes that rank 0 gives to its engine",
    "sync/gb_per_s": "sync/bytes per second of the sync phase, 1e9 bytes",
    "sync/version": "version of the weights that the engines hold",
    "sync/proof": "1 when every tensor's digest in the engines equals the trainer's",
    "time/step": "seconds of the whole step",
    "time/<phase>": "seconds of one phase on rank 0: sync, rollout, logprob, logic, update, save (of the step before), eval",
    "perf/tokens_per_s": "batch/tokens per second of the whole step",
    "perf/tokens_per_s_per_rank": "the same, per rank",
    "mem/peak_gb": "most memory of rank 0 in the step, 1e9 bytes: the device's on CUDA; on CPU the largest resident set seen at phase ends",
    "mem/after_sleep_gb": "memory of rank 0 after the actor has gone to sleep, 1e9 bytes",
    "eval/<set>/accuracy": "mean of the first reward function on the set",
    "eval/<set>/reward": "mean reward on the set",
}
_PATTERNS = {re.compile(re.sub(r"<\w+>", r"[^/]+", name)): doc for name, doc in METRICS.items() if "<" in name}


def describe(name: str) -> str | None:
    """What a metric is; None if the list does not know the name."""
    return METRICS.get(name) or next((doc for pattern, doc in _PATTERNS.items() if pattern.fullmatch(name)), None)


class Metrics:
    """Appends to metrics.jsonl. Every line is flushed to the disk: a kill loses no line that was written.

    {"step": 3, "time": 1764460800.1, "reward/mean": 0.5, "train/loss": null, "nonfinite": {"train/loss": "nan"}}
    """

    def __init__(self, path: Path, resume_step: int | None = None):
        """resume_step: the step of the checkpoint that the run goes on from; later lines came from the killed run and are dropped.

        None starts an empty file.
        """
        self.path = path
        kept = [] if resume_step is None else [line for line in read_metrics(path) if line["step"] <= resume_step]
        replace_text(path, "".join(json.dumps(line) + "\n" for line in kept))
        self.last_step = kept[-1]["step"] if kept else -1
        self._file = path.open("a")

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """One line for one step, and steps go up."""
        assert step > self.last_step, f"step {step} was written after step {self.last_step}: metrics.jsonl has each step once"
        self._file.write(json.dumps(as_line(step, time.time(), metrics), allow_nan=False) + "\n")
        self._file.flush()
        os.fsync(self._file.fileno())
        self.last_step = step

    def close(self) -> None:
        self._file.close()


def as_line(step: int, now: float, metrics: Mapping[str, float]) -> dict[str, Any]:
    """JSON knows no nan and no infinity: such a value is null, and `nonfinite` says what it was."""
    values = {name: float(value) for name, value in metrics.items()}
    nonfinite = {name: str(value) for name, value in values.items() if not math.isfinite(value)}
    line = {"step": step, "time": round(now, 3)} | {n: None if n in nonfinite else v for n, v in values.items()}
    return line | {"nonfinite": nonfinite} if nonfinite else line


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The lines of metrics.jsonl; a last line that a kill cut short is left out. No file: no lines."""
    if not path.exists():
        return []
    lines = path.read_text().split("\n")
    return [json.loads(line) for line in lines[:-1]]  # a whole line ends with a newline; what follows the last one is a torn write


def replace_text(path: Path, text: str) -> None:
    """Atomic: after a kill at any moment the file has either the old text or the new one."""
    fresh = path.with_name(f".{path.name}.{os.getpid()}.new")
    with fresh.open("w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    os.replace(fresh, path)
