"""Which groups a step trains on. Without algo.dynamic: one round of generation, every group of it.

With it (DAPO, arXiv:2503.14476, section 3.2): groups kept from the step before come first, then rounds of fresh prompts, until enough
groups carry a signal. All ranks hold the same numbers of groups; the samples stay on the rank whose engine made them.
"""

from __future__ import annotations

import dataclasses
import math
import time
from dataclasses import dataclass
from typing import Any

import torch

from megaflow.algo import ADVANTAGES
from megaflow.algo.filters import uniform_groups
from megaflow.algo.shaping import own_length_shaping
from megaflow.config.schema import Config
from megaflow.data import PromptStream
from megaflow.parallel.mesh import Mesh
from megaflow.rewards import RewardPool
from megaflow.rollout.base import Rollout
from megaflow.trainer import kept
from megaflow.trainer.mesh_scorer import MeshScorer
from megaflow.trainer.scoring import is_solved, score
from megaflow.types import Sample, Stats

ROUND = 1 << 32  # seeds of round r of a step: (run seed, step + r * ROUND); the first round's are those of a step without rounds


class Sampler:
    """Makes the draws of the steps, and holds between them the groups that were kept."""

    def __init__(
        self,
        cfg: Config,
        mesh: Mesh,
        data: PromptStream,
        rollout: Rollout,
        rewards: RewardPool | None,
        reward_model: MeshScorer | None = None,
    ):
        self.cfg, self.mesh, self.data, self.rollout, self.rewards = cfg, mesh, data, rollout, rewards
        self.reward_model = reward_model
        self.with_routes = {"routes": True} if cfg.actor.router_replay != "none" else {}  # what `generate` is asked for besides
        self.needs_greedy = getattr(ADVANTAGES.get(cfg.algo.advantage), "needs_greedy", False)
        self.kept: list[Sample] = []  # this rank's samples of the groups 0 to num_kept - 1
        self.num_kept = 0

    def begin(self, step: int) -> Draw:
        """The draw of a step; takes over what was kept."""
        draw = Draw(self, step, self.kept, self.num_kept)
        self.kept, self.num_kept = [], 0
        return draw

    def state_dict(self) -> dict[str, Any]:
        """Collective. The kept groups, with their tokens; JSON will hold it. Rank 0's counts."""
        samples = self.mesh.gather_from_engines(self.kept, with_tokens=True)
        return {"groups": self.num_kept, "samples": [kept.to_json(sample) for sample in samples]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Rank 0 takes all kept samples; where a sample lies has no influence on what is done with it."""
        self.num_kept = state["groups"]
        self.kept = [kept.from_json(saved, self.data) for saved in state["samples"]] if self.mesh.rank == 0 else []


class Draw:
    """The samples of one step as they come in: `while draw.wants_more: draw.judge(draw.generate())`, then `draw.finish()`."""

    def __init__(self, sampler: Sampler, step: int, samples: list[Sample], num_kept: int):
        self.sampler, self.cfg, self.mesh, self.step = sampler, sampler.cfg, sampler.mesh, step
        self.wanted = self.cfg.rollout.prompts_per_step
        self.dynamic = self.cfg.algo.dynamic
        self.samples = samples  # this rank's, of the groups in good and dull
        self.good, self.dull = list(range(num_kept)), []  # numbers of the groups with and without a signal, in order of their making
        self.num_kept, self.num_groups, self.rounds = num_kept, num_kept, 0
        self.seconds = 0.0  # of generation
        self.tokens, self.reward_sum, self.num_scored = 0, 0.0, 0
        self.failures: dict[str, int] = {}
        self.stats: Stats = {}  # filled by finish()

    @property
    def wants_more(self) -> bool:
        """Whether groups are missing, rounds and prompts left. The same on every rank."""
        is_short = len(self.good) < self.wanted and self.rounds < max(self.dynamic.rounds, 1)
        return is_short and self.sampler.data.left != 0

    def generate(self) -> list[Sample]:
        """Collective. One round of fresh prompts: on each rank its engine's samples, and for ReMax a greedy one of each, index last."""
        prompts = self.sampler.data.next(self._num_prompts())
        rollout, seed = self.sampler.rollout, (self.cfg.run.seed, self.step + self.rounds * ROUND)
        num_samples, version = self.cfg.rollout.samples_per_prompt, self.step - 1
        start = time.perf_counter()
        made = rollout.generate(prompts, self.cfg.sampling, seed, num_samples, version, **self.sampler.with_routes)
        if self.sampler.needs_greedy:
            greedy = dataclasses.replace(self.cfg.sampling, temperature=0.0)
            made += [dataclasses.replace(s, index=num_samples) for s in rollout.generate(prompts, greedy, seed, 1, version)]
        self.seconds += time.perf_counter() - start
        for sample in made:
            sample.group += self.num_groups
        self.num_groups += len(prompts)
        self.rounds += 1
        return made

    def _num_prompts(self) -> int:
        missing = self.wanted - len(self.good)
        wanted = math.ceil(missing * self.dynamic.factor) if self.dynamic.rounds else missing
        left = self.sampler.data.left
        return wanted if left is None else min(wanted, left)

    def judge(self, samples: list[Sample]) -> None:
        """Collective. Score a round's samples, and see which of its groups carry a signal; the others make room for the next round's."""
        is_small = self.rounds > 1 or self.num_kept > 0  # perhaps one group, whose rewards may all fail by chance
        rows, failures = score(self.mesh, self.sampler.rewards, samples, self.sampler.reward_model, may_all_fail=is_small)
        verdict = self.mesh.on_rank0(judge, rows, self.cfg)  # 0
        for group, prompt_id, pass_rate, reward in verdict.prompts:
            self.sampler.data.record(prompt_id, pass_rate, reward)
            (self.good if group in verdict.good or not self.dynamic.rounds else self.dull).append(group)
        self.dull = self.dull[: self.wanted]  # no more of them can be needed
        self._count(verdict, failures)
        present = {*self.good, *self.dull}
        for sample in samples:
            sample.baseline = verdict.baselines.get(sample.group, 0.0)
            if sample.group in present and sample.index < self.cfg.rollout.samples_per_prompt:
                self.samples.append(sample)

    def _count(self, verdict: Verdict, failures: dict[str, int]) -> None:
        self.tokens += verdict.tokens
        self.reward_sum += verdict.reward_sum
        self.num_scored += verdict.num_samples
        self.failures = {kind: self.failures.get(kind, 0) + number for kind, number in failures.items()}

    def finish(self) -> list[Sample]:
        """This rank's samples of the groups to train on, numbered from 0, oldest first; groups left over are kept as algo.dynamic says.

        Groups without a signal fill up the step with short=fill, and when there is no other group at all.
        """
        taken = self.good[: self.wanted]
        left_over = self.good[self.wanted :]
        filled = self.dull[: self.wanted - len(taken)] if self.dynamic.short == "fill" or not taken else []
        if self.dynamic.surplus == "keep":
            self.sampler.kept, self.sampler.num_kept = self._numbered(left_over), len(left_over)
        self.stats = self._stats(len(taken), len(filled), len(left_over))
        return self._numbered(taken + filled)

    def _numbered(self, groups: list[int]) -> list[Sample]:
        number = {group: place for place, group in enumerate(groups)}
        return [dataclasses.replace(s, group=number[s.group]) for s in self.samples if s.group in number]

    def _stats(self, taken: int, filled: int, left_over: int) -> Stats:
        stats = {f"reward/{kind}": float(self.failures.get(kind, 0)) for kind in ("failed", "timeout")}
        stats["rollout/tokens"] = float(self.tokens)
        if self.rounds:
            stats["rollout/tokens_per_s"] = self.tokens / self.seconds
        if not self.dynamic.rounds:
            return stats
        generated = self.num_groups - self.num_kept
        kept_on = left_over if self.dynamic.surplus == "keep" else 0
        dynamic = {
            "rounds": self.rounds,
            "groups_generated": generated,
            "groups_dropped": self.num_groups - taken - filled - kept_on,
            "groups_kept": kept_on,
            "filled": filled,
            "missing": self.wanted - taken - filled,
        }
        reward = {"dynamic/reward_mean": self.reward_sum / self.num_scored} if self.num_scored else {}
        return stats | {f"dynamic/{name}": float(value) for name, value in dynamic.items()} | reward


@dataclass(frozen=True)
class Verdict:
    """Of a round's groups."""

    prompts: list[tuple[int, str, float, float]]  # group, its prompt's id, part of the samples that are solved, mean reward
    good: set[int]  # groups whose rewards differ
    baselines: dict[int, float]  # group -> reward of the greedy response, less what its length costs
    tokens: int
    reward_sum: float
    num_samples: int


def judge(rows: list[Sample], cfg: Config) -> Verdict:
    """Which groups carry a signal, by the rewards as the functions gave them. Runs on rank 0; rows in (group, index) order."""
    tokens = sum(row.num_response for row in rows)
    greedy = [row for row in rows if row.index == cfg.rollout.samples_per_prompt]
    rows = [row for row in rows if row.index < cfg.rollout.samples_per_prompt]
    rewards = torch.tensor([row.reward for row in rows], dtype=torch.float64)
    groups = torch.tensor([row.group for row in rows])
    good = set(groups[~uniform_groups(rewards, groups)].tolist())
    members: dict[int, list[Sample]] = {}
    for row in rows:
        members.setdefault(row.group, []).append(row)
    prompts = [
        (group, found[0].prompt.id, sum(is_solved(s, cfg) for s in found) / len(found), sum(s.reward for s in found) / len(found))
        for group, found in members.items()
    ]
    return Verdict(prompts, good, baselines(greedy, cfg), tokens, float(rewards.sum()), len(rows))


def baselines(greedy: list[Sample], cfg: Config) -> dict[int, float]:
    """group -> reward of its greedy response, with the same cost of its length as the samples bear."""
    terms = own_length_shaping(torch.tensor([s.num_response for s in greedy]), cfg.algo, cfg.sampling.max_new_tokens)
    return {s.group: s.reward + sum(float(term[i]) for term in terms.values()) for i, s in enumerate(greedy)}
