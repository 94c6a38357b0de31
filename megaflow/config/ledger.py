"""The batch ledger: how many sequences go where in one step. Every count is in sequences (a prompt with one response)."""

from __future__ import annotations

from dataclasses import dataclass

from megaflow.config.schema import Config


@dataclass(frozen=True)
class Ledger:
    """Counts of one step. Per-rank figures are means: samples are balanced by tokens, so a rank's own count may differ."""

    world_size: int
    steps: int
    tp: int
    pp: int
    data_parallel: int  # copies of the actor
    prompts: int  # G, per step
    samples_per_prompt: int
    samples: int  # N = prompts * samples_per_prompt, per step
    samples_per_rank: float  # per data-parallel rank
    engines: int
    engine_tp: int
    prompts_per_engine: float
    samples_per_engine: float
    mini_batch: int  # samples per optimizer step, over all ranks
    mini_batches: int  # in one pass over the step's samples
    mini_batch_per_rank: float
    micro_batch_tokens: int  # tokens, the one exception: micro batches are packed by length
    longest: int  # tokens of the longest sequence possible
    optimizer_steps: int  # per RL step
    optimizer_steps_total: int

    @classmethod
    def of(cls, config: Config, world_size: int) -> Ledger:
        """The arithmetic of a configuration that `checks.check` has passed."""
        rollout, actor = config.rollout, config.actor
        data_parallel = world_size // (config.parallel.tp * config.parallel.pp * config.parallel.cp)
        engines = world_size // rollout.tp
        samples = rollout.prompts_per_step * rollout.samples_per_prompt
        mini_batch = actor.mini_batch or samples
        optimizer_steps = samples // mini_batch * actor.epochs
        return cls(
            world_size=world_size,
            steps=config.run.steps,
            tp=config.parallel.tp,
            pp=config.parallel.pp,
            data_parallel=data_parallel,
            prompts=rollout.prompts_per_step,
            samples_per_prompt=rollout.samples_per_prompt,
            samples=samples,
            samples_per_rank=samples / data_parallel,
            engines=engines,
            engine_tp=rollout.tp,
            prompts_per_engine=rollout.prompts_per_step / engines,
            samples_per_engine=samples / engines,
            mini_batch=mini_batch,
            mini_batches=samples // mini_batch,
            mini_batch_per_rank=mini_batch / data_parallel,
            micro_batch_tokens=actor.micro_batch_tokens,
            longest=config.data.max_prompt_tokens + config.sampling.max_new_tokens,
            optimizer_steps=optimizer_steps,
            optimizer_steps_total=optimizer_steps * config.run.steps,
        )

    def table(self) -> str:
        """For the log at the start, one fact a line."""
        rows = [
            ("ranks", f"{self.world_size} = tp {self.tp} x pp {self.pp} x dp {self.data_parallel}"),
            ("engines", f"{self.engines} of {self.engine_tp} rank(s)"),
            ("prompts a step", f"{self.prompts}, {_mean(self.prompts_per_engine)} an engine"),
            ("samples a step", f"{self.samples} = {self.prompts} x {self.samples_per_prompt}, {_mean(self.samples_per_engine)} an engine"),
            ("samples a data-parallel rank", _mean(self.samples_per_rank)),
            ("mini batch", f"{self.mini_batch} samples, {_mean(self.mini_batch_per_rank)} a data-parallel rank"),
            ("micro batch", f"as many sequences as fit {self.micro_batch_tokens} tokens (the longest possible has {self.longest})"),
            ("optimizer steps", f"{self.optimizer_steps} a step, {self.optimizer_steps_total} in {self.steps} steps"),
        ]
        width = max(len(name) for name, _ in rows)
        return "\n".join(f"  {name:<{width}}  {value}" for name, value in rows)


def _mean(count: float) -> str:
    return f"{count:.0f}" if count == int(count) else f"{count:.1f} on average"
