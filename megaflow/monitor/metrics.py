"""The one list of metric names, and metrics.jsonl: one strict JSON object a line, each step once, also over kills and resumes."""

from __future__ import annotations

import errno
import json
import logging
import math
import os
import re
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megaflow.monitor.intact import Damaged, json_lines, told

log = logging.getLogger(__name__)

# name -> what it is. A part in <...> stands for a name of the run: a reward function, an eval set, a phase, a loss function's own figure.
METRICS = {
    "reward/mean": "mean reward of the step's samples",
    "reward/std": "standard deviation of the rewards over all samples of the step",
    "reward/model": "mean score of the reward model, as it gives it: before reward.model.normalize, clip and weight",
    "reward/<fn>": "mean of one reward function, unweighted",
    "reward/failed": "samples whose reward function raised or overran its time, and got reward.failed instead",
    "reward/timeout": "those of reward/failed that overran reward.timeout_s",
    "reward/uniform_groups": "part of the groups whose rewards are all equal: they carry no signal",
    "reward/overlong": "mean over the samples of what algo.overlong adds to the reward, 0 or below",
    "reward/length": "mean over the samples of what algo.length adds to the reward",
    "reward/kl_penalty": "mean over the samples of what the distance to the reference takes off the reward (algo.kl.where=reward)",
    "rollout/len_mean": "mean length of a response, tokens",
    "rollout/len_max": "longest response, tokens",
    "rollout/truncated": "part of the responses that reached sampling.max_new_tokens",
    "rollout/tokens": "tokens generated in the step, all engines",
    "rollout/tokens_per_s": "tokens generated per second of the rollout phase, all engines",
    "rollout/engine_restarts": "engines that died or hung and were started anew, in a step that has such",
    "rollout/restart_s": "seconds that it took until they had the weights again; what was generated twice comes on top",
    "batch/left_out": "part of the step's samples that are not trained on: algo.drop_uniform, algo.overlong.filter",
    "dynamic/rounds": "times that the step generated; algo.dynamic.rounds is the most",
    "dynamic/groups_generated": "groups generated in the step",
    "dynamic/groups_dropped": "groups that the step had and neither trained on nor kept",
    "dynamic/groups_kept": "groups with a signal that are kept for the next step (algo.dynamic.surplus=keep)",
    "dynamic/filled": "groups without a signal that the step was filled up with",
    "dynamic/missing": "groups fewer than rollout.prompts_per_step that the step was made with",
    "dynamic/reward_mean": "mean reward of all samples generated in the step; reward/mean is that of those taken",
    "data/<source>/reward": "mean reward of a source's prompts, of all samples generated for them in the step",
    "data/pass_rate_mean": "mean of the prompts' running pass rates, over those that have one",
    "data/epoch": "epoch of the last prompt handed out, from 0",
    "data/skipped": "prompts that data.skip_solved leaves out",
    "batch/tokens": "prompt and response tokens of the step, all ranks",
    "train/loss": "loss, averaged over the step's optimizer steps",
    "train/kl": "k3 of the policy before the update against the policy within it: how far the step has moved; mean over response tokens",
    "train/ref_kl": "KL from the reference model by algo.kl.estimator, mean over response tokens; only with algo.kl.where other than none",
    "train/ratio": "mean ratio of the policy to the policy before the update, over response tokens",
    "train/clip_frac": "part of the response tokens whose ratio was clipped",
    "train/correction_weight": "mean weight that algo.correction gives a response token; only with a mode other than none",
    "train/correction_cut": "part of the response tokens whose weight algo.correction truncated or set to 0",
    "train/entropy": "mean entropy of the policy over response tokens, nats",
    "train/nll": "mean negative log-likelihood of the response tokens, nats (offline.objective=sft)",
    "train/grad_norm": "global gradient norm before clipping, averaged over the step's optimizer steps",
    "train/lr": "learning rate of the step's last optimizer step",
    "train/skipped": "optimizer steps left out because a gradient was not finite",
    "train/optimizer_steps": "optimizer steps made in the step",
    "train/cov_marked": "part of the response tokens that loss=clip_cov or kl_cov has picked",
    "train/<name>": "whatever else a loss function reports, as the mean over response tokens",
    "algo/kl_coef": "weight of the distance to the reference in this step: algo.kl.coef as controller and guards have changed it",
    "algo/ref_kl": "KL from the reference model before the update, by algo.kl.estimator, mean over response tokens; the controller's",
    "guard/fired": "guards past their limit in this step, those that only warn too",
    "guard/actions": "actions of guards other than warn so far in the run; guard.max_actions is the most",
    "guard/rollbacks": "those of guard/actions that went back to a checkpoint",
    "guard/diverged": "1: the update ended as diverged, and the run goes back to a checkpoint for it; only then",
    "guard/lr_scale": "what guards have multiplied the learning rate by",
    "critic/loss": "value loss, averaged over the step's optimizer steps",
    "critic/clip_frac": "part of the response tokens whose value was held near the one before the update (critic.clip_value)",
    "critic/value_mean": "mean value that the critic expected before the update, over response tokens",
    "critic/return_mean": "mean of what it should have expected",
    "critic/explained_variance": "1 - Var(return - value) / Var(return) over response tokens: 1 perfect, 0 no better than the mean return",
    "critic/grad_norm": "global gradient norm of the critic before clipping, averaged over the step's optimizer steps",
    "critic/lr": "learning rate of the critic, averaged over the step's optimizer steps",
    "critic/skipped": "optimizer steps of the critic left out because a gradient was not finite",
    "critic/optimizer_steps": "optimizer steps of the critic made in the step",
    "mismatch/logp_abs_diff": "mean |engine's logp - trainer's logp| over response tokens, same weights",
    "mismatch/kl": "mean of the engine's logp - the trainer's logp: KL of the engine's distribution against the trainer's, unbiased",
    "mismatch/k3": "k3 of the engine's distribution against the trainer's; 0 if they compute the same",
    "mismatch/ratio": "mean of rho = the trainer's probability / the engine's, over response tokens; 1 if they compute the same",
    "mismatch/chi2": "mean of rho^2 - 1, chi2 of the trainer's distribution against the engine's",
    "mismatch/ess": "effective sample size, (mean rho)^2 / mean(rho^2): the part of the tokens that importance-weighted means are worth",
    "mismatch/ratio_max": "largest rho of a response token",
    "mismatch/ratio_min": "smallest rho of a response token",
    "mismatch/chi2_seq": "mean over sequences of (product of rho)^2 - 1",
    "mismatch/rejected": "part of the sequences that algo.correction leaves out as a whole; only if it can",
    "moe/routes_differ": "part of the engine's routes (token, layer, expert) that the trainer would not choose; with actor.router_replay",
    "sync/bytes": "bytes that the engine worker beside rank 0 gets",
    "sync/link_bytes": "those of sync/bytes that it reads from other ranks; only with sync.transport=pull",
    "sync/seconds": "from the trained weights to the engines that hold them, proven if sync.proof; part of time/sync",
    "sync/gb_per_s": "sync/bytes per second of sync/seconds, 1e9 bytes",
    "sync/copy_ms": "milliseconds in which the engine worker beside rank 0 copied; only with sync.transport=pull",
    "sync/proof_ms": "milliseconds of its digests; the trainer's run beside the copy; only with sync.transport=pull",
    "sync/version": "version of the weights that the engines hold",
    "sync/proof": "1 when every tensor's digest in the engines equals the trainer's",
    "time/step": "seconds of the whole step",
    "time/<phase>": "seconds of one phase on rank 0: sync, rollout, reward, logprob, logic, update, save (of the step before), eval",
    "time/startup_imports": "seconds from the start of rank 0's process until its parts are built; with the first metrics only",
    "time/startup_actor": "seconds in which the actor was built",
    "time/startup_engine": "seconds from the launch of rank 0's engine, which starts beside the actor, until it was ready",
    "time/startup_first_token": "seconds from the start of rank 0's process to the first token of its engine",
    "save/wait_s": "seconds that a save waited until the checkpoint before it was written; part of time/save, and told with it",
    "save/write_s": "seconds in which a checkpoint's files were written, of the slowest rank; in the step after it was found whole",
    "save/gb": "tensors of that checkpoint, all ranks, 1e9 bytes",
    "perf/tokens_per_s": "batch/tokens per second of the whole step",
    "perf/tokens_per_s_per_rank": "the same, per rank",
    "mem/peak_gb": "most memory of rank 0 in the step, 1e9 bytes: the device's on CUDA; on CPU the largest resident set seen at phase ends",
    "mem/after_sleep_gb": "memory of rank 0 after the actor has gone to sleep, 1e9 bytes",
    "mem/<phase>/actor_gb": "most that the trainer of rank 0 held in the phase; on CPU its largest resident set seen at phase ends",
    "mem/<phase>/engine_gb": "most that the engine held in the phase; where NVML hides who holds what: at its end, with CUDA's context",
    "mem/<phase>/reserved_gb": "what the trainer's allocator kept of the device at the phase's end, used or not (CUDA)",
    "mem/<phase>/outside_gb": "what the trainer holds at the phase's end beside its allocator: context, NCCL (CUDA, where NVML tells)",
    "mem/<phase>/device_gb": "memory in use on rank 0's GPU at the phase's end; after rollout actor and engine sleep (CUDA)",
    "device/util_<phase>": "mean utilisation of rank 0's GPU in the phase by NVML, percent: part of the time with any kernel running",
    "device/power_w_<phase>": "mean power of rank 0's GPU in the phase, watts",
    "device/energy_j": "energy that rank 0's GPU took in the step, joules",
    "offline/epoch": "passes made over the stored data; in steps up to offline.steps",
    "offline/version": "mean version of the weights that the step's stored samples were drawn with, as their file says (rl)",
    "offline/staleness": "steps made since those weights, if they are of this run or of its starting point (rl)",
    "dpo/margin": "beta * mean margin: how much more the policy prefers `chosen` to `rejected` than the reference model does, nats",
    "dpo/accuracy": "part of the pairs with a positive margin",
    "dpo/chosen_logp": "mean log-probability of a chosen response, whole",
    "dpo/rejected_logp": "mean log-probability of a rejected response, whole",
    "generate/lines": "lines written of the chunk's samples (launch/generate.py)",
    "generate/samples_per_s": "samples generated, scored and written per second",
    "generate/tokens_per_s": "response tokens of those",
    "eval/<set>/accuracy": "mean of the first reward function on the set",
    "eval/<set>/reward": "mean reward on the set",
    "eval/<set>/pass@<k>": "probability that k samples of a prompt hold a solved one, unbiased, mean over the set; eval.samples > 1",
    "eval/<set>/avg@<k>": "part of the samples that are solved, k = eval.samples",
    "eval/<set>/maj@<k>": "part of the prompts whose most frequent answer is right, k = eval.samples",
}
_PATTERNS = {re.compile(re.sub(r"<(\w+)>", r"(?P<\1>[^/]+)", name)): name for name in METRICS if "<" in name}


def template(name: str) -> tuple[str, dict[str, str]] | None:
    """Its entry in the list, and what the <...> are: eval/sums/accuracy -> eval/<set>/accuracy, {"set": "sums"}. None if unknown."""
    if name in METRICS:
        return name, {}
    matches = ((entry, pattern.fullmatch(name)) for pattern, entry in _PATTERNS.items())
    return next(((entry, match.groupdict()) for entry, match in matches if match), None)


def describe(name: str) -> str | None:
    """What a metric is; None if the list does not know the name."""
    found = template(name)
    return METRICS[found[0]] if found else None


class Metrics:
    """Appends to metrics.jsonl. Every line is flushed to the disk: a kill loses no line that was written.

    {"step": 3, "time": 1764460800.1, "reward/mean": 0.5, "train/loss": null, "nonfinite": {"train/loss": "nan"}}
    """

    def __init__(self, path: Path, resume_step: int | None = None):
        """resume_step: the step of the checkpoint that the run goes on from; later lines came from the killed run and are dropped.

        None starts an empty file.
        """
        self.path = path
        kept = [] if resume_step is None else [line for line in self._whole_lines() if line["step"] <= resume_step]
        replace_text(path, "".join(json.dumps(line) + "\n" for line in kept))
        self.last_step = kept[-1]["step"] if kept else -1

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """One line for one step, and steps go up. After an OSError (the disk is full) nothing of the line is there: try again later."""
        assert step > self.last_step, f"step {step} was written after step {self.last_step}: metrics.jsonl has each step once"
        line = (json.dumps(as_line(step, time.time(), metrics), allow_nan=False) + "\n").encode()
        with self.path.open("ab", buffering=0) as file:  # anew each time: the handle of a file system that was away stays stale
            end = os.fstat(file.fileno()).st_size
            try:
                if file.write(line) < len(line):  # room for a part of it
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self.path))
                os.fsync(file.fileno())
            except OSError:
                os.ftruncate(file.fileno(), end)
                raise
        self.last_step = step

    def go_back(self, step: int, archive: Path, given_up: int, metrics: Mapping[str, float]) -> None:
        """Lines after `step` move to the end of `archive`, with those of the step `given_up`, which was not written here."""
        lines = self._whole_lines()
        last = as_line(given_up, time.time(), metrics)
        gone = [line | {"rolled_back_to": step} for line in [*(each for each in lines if each["step"] > step), last]]
        with archive.open("a") as file:
            file.writelines(json.dumps(line) + "\n" for line in gone)
            file.flush()
            os.fsync(file.fileno())
        kept = [line for line in lines if line["step"] <= step]
        replace_text(self.path, "".join(json.dumps(line) + "\n" for line in kept))
        self.last_step = kept[-1]["step"] if kept else -1

    def _whole_lines(self) -> list[dict[str, Any]]:
        """For a file that is to be written anew: its damaged lines go to the end of metrics_damaged.jsonl, as they are."""
        lines, damaged = metrics_lines(self.path)
        if damaged:
            aside = self.path.with_name(f"{self.path.stem}_damaged.jsonl")
            with aside.open("ab") as file:
                file.writelines(each.raw + b"\n" for each in damaged)
                file.flush()
                os.fsync(file.fileno())
            log.warning("%s; kept in %s", told(self.path, damaged), aside)
        return lines


def as_line(step: int, now: float, metrics: Mapping[str, float]) -> dict[str, Any]:
    """JSON knows no nan and no infinity: such a value is null, and `nonfinite` says what it was."""
    values = {name: float(value) for name, value in metrics.items()}
    nonfinite = {name: str(value) for name, value in values.items() if not math.isfinite(value)}
    line = {"step": step, "time": round(now, 3)} | {n: None if n in nonfinite else v for n, v in values.items()}
    return line | {"nonfinite": nonfinite} if nonfinite else line


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The lines of metrics.jsonl. Left out: damaged ones, with a warning, and a last one that a kill cut short. No file: no lines."""
    lines, damaged = metrics_lines(path)
    if damaged:
        log.warning(told(path, damaged))
    return lines


def metrics_lines(path: Path) -> tuple[list[dict[str, Any]], list[Damaged]]:
    """(whole lines, damaged ones) of metrics.jsonl."""
    if not path.exists():
        return [], []
    raw = path.read_bytes().split(b"\n")
    return json_lines(raw[:-1], _fault)  # a whole line ends with a newline; what follows the last one is a torn write


def _fault(line: dict[str, Any]) -> str:
    """What keeps a JSON object from being a line of metrics: no step, or a metric that is no finite number and not null."""
    if type(line.get("step")) is not int:
        return "no step" if "step" not in line else f"its step is {line['step']!r:.60}"
    values = ((name, value) for name, value in line.items() if "/" in name and value is not None)
    wrong = (pair for pair in values if not (isinstance(pair[1], int | float) and abs(pair[1]) <= sys.float_info.max))
    return next((f"{name} is {value!r:.60}" for name, value in wrong), "")


def replace_text(path: Path, text: str) -> None:
    """Atomic: after a kill at any moment, and after an OSError, the file has either the old text or the new one."""
    fresh = path.with_name(f".{path.name}.{os.getpid()}.new")
    try:
        with fresh.open("w") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(fresh, path)
    except OSError:
        fresh.unlink(missing_ok=True)
        raise
