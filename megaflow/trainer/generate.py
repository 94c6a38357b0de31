"""Batch generation: samples of a model folder or a checkpoint for every prompt of data.train, scored, into one file."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import yaml

from megaflow.config.printing import as_yaml
from megaflow.config.schema import Config
from megaflow.monitor import progress
from megaflow.monitor.console import duration
from megaflow.monitor.metrics import Metrics
from megaflow.monitor.recorded import flat
from megaflow.parallel import comm, device
from megaflow.parallel.mesh import Mesh
from megaflow.trainer.build import Parts, build
from megaflow.trainer.chunks import ChunkedOutput, Line
from megaflow.trainer.evaluate import load_checkpoint
from megaflow.trainer.selection import KINDS, first_of_each
from megaflow.trainer.watched import watched
from megaflow.types import Prompt, Sample, Stats

SEED_STEP = -2  # in the place of a training step's number (an evaluation has -1): a prompt's seeds depend on nothing but its id
DECIDING = ("run.seed", "run.resume", "model.", "data.", "sampling.", "reward.", "rollout.backend", "generate.")
FREE = ("generate.output", "data.eval", "data.rollouts", "data.shuffle", "data.epochs", "reward.workers", "reward.timeout_s")


def generate_run(cfg: Config) -> None:
    """Collective. Write generate.output; the same command goes on where a killed one stopped, and ends with the same bytes.

    Raises ConfigError when the output is finished or was begun with other settings.
    """
    device.seed_everything(cfg.run.seed)
    mesh = Mesh.create(cfg.parallel, cfg.rollout.tp, cfg.run.timeout_s)
    path = output_path(cfg)
    kept: list[ChunkedOutput] = []
    mesh.on_rank0(lambda: kept.append(ChunkedOutput(path, deciding_settings(cfg))))
    with watched(cfg, mesh, path.parent):
        parts = build(cfg, mesh, with_engine=True)
        mesh.on_rank0(lambda: kept[0].same_data(parts.data.fingerprint))
        step = load_checkpoint(cfg, mesh, parts)
        with progress.phase("sync", 0):
            parts.sync(step)
        generate_all(cfg, mesh, parts, step, kept[0] if kept else None)
        parts.close()
    mesh.close()


def generate_all(cfg: Config, mesh: Mesh, parts: Parts, version: int, output: ChunkedOutput | None) -> None:
    """Collective. Every chunk that is not there yet, and the whole file. output: on rank 0."""
    prompts = parts.data.prompts
    chunks = [prompts[i : i + cfg.generate.chunk] for i in range(0, len(prompts), cfg.generate.chunk)]
    done = mesh.on_rank0(lambda: output.done())
    shown = Progress(output.path, len(prompts), cfg.generate.chunk, done) if output is not None else None
    for number, chunk in enumerate(chunks):
        if number not in done:
            with progress.phase("rollout", number + 1):
                samples = generate_chunk(cfg, mesh, parts, chunk, version)  # C
            with progress.phase("reward", number + 1):
                mesh.on_rank0(lambda n=number, s=samples: _score_and_write(cfg, parts, output, shown, n, s))  # 0
    mesh.on_rank0(lambda: _finish(cfg, output, version, len(prompts), len(chunks)))


def generate_chunk(cfg: Config, mesh: Mesh, parts: Parts, prompts: list[Prompt], version: int) -> list[Sample]:
    """Collective. On rank 0 every sample of these prompts with its tokens, in (group, index) order; elsewhere nothing."""
    mine = parts.rollout.generate(prompts, cfg.sampling, (cfg.run.seed, SEED_STEP), cfg.generate.samples, version)
    if parts.reward_model is not None:
        parts.reward_model.score(mine)
    return comm.gather(mesh.host_group, mine)


def output_path(cfg: Config) -> Path:
    return Path(cfg.generate.output or Path(cfg.run.root) / cfg.run.name / f"generated.{cfg.generate.format}")


def deciding_settings(cfg: Config) -> dict[str, Any]:
    """The settings that the output's content depends on, by dotted key."""
    values = flat(yaml.safe_load(as_yaml(cfg)))
    return {key: value for key, value in values.items() if key.startswith(DECIDING) and key not in FREE}


def _score_and_write(cfg: Config, parts: Parts, output: ChunkedOutput, shown: Progress, number: int, samples: list[Sample]) -> None:
    parts.rewards.score(samples)  # it learns nothing from them: a reward must not depend on what came before a kill
    lines = select(cfg, samples)
    output.write(number, lines)
    shown.chunk(number, samples, len(lines))


def select(cfg: Config, samples: list[Sample]) -> list[Line]:
    """The lines of generate.kind, prompt by prompt."""
    groups: dict[int, list[Sample]] = {}
    for s in samples:
        groups.setdefault(s.group, []).append(s)
    kind = KINDS[cfg.generate.kind]
    return [line for group in groups.values() for line in kind(group, cfg.generate, cfg.sampling.temperature)]


def _finish(cfg: Config, output: ChunkedOutput, step: int, prompts: int, chunks: int) -> None:
    summary = {"kind": cfg.generate.kind, "model": cfg.model.path, "step": step}
    summary |= {"prompts": prompts, "samples": prompts * cfg.generate.samples}
    keep = {"keep": first_of_each()} if cfg.generate.kind == "sft" else {}
    lines = output.finish(chunks, summary, **keep)
    print(f"written: {output.path} ({lines} lines, kind {cfg.generate.kind})", flush=True)


class Progress:
    """One console line and one line of <output>.metrics.jsonl for each chunk."""

    def __init__(self, path: Path, prompts: int, chunk: int, done: set[int]):
        self.prompts, self.chunk_size, self.finished = prompts, chunk, len(done)
        self.chunks = -(-prompts // chunk)
        self._metrics = Metrics(path.with_name(path.name + ".metrics.jsonl"), max(done) + 1 if done else None)
        self._mark = self._start = time.perf_counter()
        self._made = 0
        if done:
            print(f"generate: {len(done)} of {self.chunks} chunks are there already", flush=True)

    def chunk(self, number: int, samples: list[Sample], lines: int) -> None:
        now = time.perf_counter()
        seconds, self._mark = now - self._mark, now
        self.finished, self._made = self.finished + 1, self._made + 1
        stats = chunk_stats(samples, lines, seconds)
        self._metrics.write(number + 1, stats)
        left = (now - self._start) / self._made * (self.chunks - self.finished)
        print(
            f"generate: {min(self.finished * self.chunk_size, self.prompts)}/{self.prompts} prompts | reward {stats['reward/mean']:.3f} "
            f"| {lines} lines of {len(samples)} samples | {stats['generate/samples_per_s']:,.1f} samples/s eta {duration(left)}",
            flush=True,
        )


def chunk_stats(samples: list[Sample], lines: int, seconds: float) -> Stats:
    return {
        "reward/mean": sum(s.reward for s in samples) / len(samples),
        "rollout/len_mean": sum(s.num_response for s in samples) / len(samples),
        "rollout/truncated": sum(s.finish == "length" for s in samples) / len(samples),
        "generate/lines": float(lines),
        "generate/samples_per_s": len(samples) / seconds,
        "generate/tokens_per_s": sum(s.num_response for s in samples) / seconds,
    }
