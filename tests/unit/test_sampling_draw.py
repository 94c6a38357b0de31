"""Dynamic sampling: which groups a step takes, in how many rounds, what is counted, and that a resumed run goes on the same."""

from __future__ import annotations

import dataclasses
import json
from types import SimpleNamespace

import pytest
import torch

from megaflow.config.schema import ActorConfig, AlgoConfig, Config, DataConfig, DynamicConfig, RolloutConfig, SourceConfig
from megaflow.data import PromptStream
from megaflow.rollout.base import sample_seed
from megaflow.trainer.sampling import ROUND, Sampler
from megaflow.types import Sample


class Alone:
    """A mesh of one rank."""

    rank = 0

    def gather_from_engines(self, samples, with_tokens=False):
        rows = samples if with_tokens else [s.without_tokens() for s in samples]
        return sorted(rows, key=lambda s: (s.group, s.index))

    def on_rank0(self, function, *args):
        return function(*args)


class Letters:
    """Generates one token for each sample, from its seed alone; remembers what it was asked for."""

    def __init__(self):
        self.calls = []

    def generate(self, prompts, sampling, seed, num_samples, version, routes=False):
        self.calls.append((len(prompts), seed, sampling.temperature))
        made = [self._sample(p, g, i, seed, version) for g, p in enumerate(prompts) for i in range(num_samples)]
        for s in made if routes else []:  # [T - 1 = 2, L_moe, K]
            s.routes = (s.response % 300 + torch.arange(2 * 3 * 2)).view(2, 3, 2).to(torch.int16)
        return made

    def _sample(self, prompt, group, index, seed, version):
        token = sample_seed(seed, prompt.id, index) % 1000
        return Sample(prompt, group, index, torch.tensor([token]), torch.tensor([token / 1000]), "stop", version, text=str(token))


class Rewards:
    """Prompt k is `easy` or `hard` for every sample where the test says so; else a sample's reward is the parity of its token."""

    counts = {"failed": 0, "error": 0, "timeout": 0, "died": 0}

    def __init__(self, dull):
        self.dull = dull

    def score(self, samples, learn, may_all_fail):
        for s in samples:
            s.reward = 1.0 if int(s.prompt.id.split(":")[1].split("#")[0]) in self.dull else float(int(s.text) % 2)
            s.reward_parts = {"parity": s.reward}


class Words:
    """Stands in for a tokenizer."""

    chat_template = "x"

    def apply_chat_template(self, messages, **_):
        return messages[-1]["content"]

    def __call__(self, texts, **_):
        return SimpleNamespace(input_ids=[[1, 2] for _ in texts])


def sampler(tmp_path, dull=(), prompts=40, wanted=4, samples=8, epochs=0, advantage="grpo", replay="none", **dynamic) -> Sampler:
    path = tmp_path / "p.jsonl"
    path.write_text("".join(json.dumps({"prompt": f"q{i}", "answer": ""}) + "\n" for i in range(1, prompts + 1)))
    cfg = Config(
        data=DataConfig(train=[SourceConfig(path=str(path))], shuffle=False, epochs=epochs),
        rollout=RolloutConfig(prompts_per_step=wanted, samples_per_prompt=samples),
        algo=AlgoConfig(advantage=advantage, dynamic=DynamicConfig(**dynamic)),
        actor=ActorConfig(router_replay=replay),
    )
    data = PromptStream(cfg.data, Words(), wanted, seed=0)
    return Sampler(cfg, Alone(), data, Letters(), Rewards(set(dull)))


def step(made: Sampler, number: int):
    """(ids of the prompts trained on by group, the samples, the draw)"""
    draw = made.begin(number)
    while draw.wants_more:
        draw.judge(draw.generate())
    samples = sorted(draw.finish(), key=lambda s: (s.group, s.index))
    return [int(s.prompt.id.split(":")[1]) for s in samples if s.index == 0], samples, draw


def test_without_rounds_every_group_is_taken_with_the_seeds_of_old(tmp_path):
    made = sampler(tmp_path, dull=(1, 3))
    ids, samples, draw = step(made, 1)
    assert ids == [1, 2, 3, 4] and [s.group for s in samples[::8]] == [0, 1, 2, 3]
    assert made.rollout.calls == [(4, (0, 1), 1.0)]
    assert not any(name.startswith("dynamic/") for name in draw.stats) and draw.stats["rollout/tokens"] == 32


def test_groups_without_a_signal_are_replaced_in_rounds(tmp_path):
    made = sampler(tmp_path, dull=(1, 3, 5), rounds=5)
    ids, samples, draw = step(made, 7)
    assert ids == [2, 4, 6, 7]
    # 4 missing, then 2 (prompts 5 and 6), then 1 (prompt 7); seeds by step and round
    assert made.rollout.calls == [(4, (0, 7), 1.0), (2, (0, 7 + ROUND), 1.0), (1, (0, 7 + 2 * ROUND), 1.0)]
    assert [(s.group, s.index) for s in samples] == [(g, i) for g in range(4) for i in range(8)]
    counted = {name.removeprefix("dynamic/"): value for name, value in draw.stats.items() if name.startswith("dynamic/")}
    mean = counted.pop("reward_mean")
    assert counted == {"rounds": 3, "groups_generated": 7, "groups_dropped": 3, "groups_kept": 0, "filled": 0, "missing": 0}
    assert mean == pytest.approx((3 * 8 + sum(s.reward for s in samples)) / 56)


def test_rounds_are_bounded_and_what_is_short_is_left_or_filled(tmp_path):
    ids, samples, draw = step(sampler(tmp_path, dull=(1, 2, 3, 4, 5), rounds=2), 1)
    assert ids == [6, 7, 8] and draw.stats["dynamic/missing"] == 1 and draw.stats["dynamic/filled"] == 0
    ids, samples, draw = step(sampler(tmp_path, dull=(1, 2, 3, 4, 5), rounds=2, short="fill"), 1)
    assert ids == [6, 7, 8, 1] and draw.stats["dynamic/missing"] == 0 and draw.stats["dynamic/filled"] == 1
    assert all(s.reward == 1 for s in samples if s.group == 3)


def test_a_step_without_any_signal_is_made_of_what_there_is(tmp_path):
    ids, _, draw = step(sampler(tmp_path, dull=range(1, 41), rounds=3), 1)
    assert ids == [1, 2, 3, 4] and draw.rounds == 3 and draw.stats["dynamic/filled"] == 4


def test_surplus_is_dropped_or_comes_first_in_the_next_step(tmp_path):
    made = sampler(tmp_path, dull=(1,), rounds=3, factor=1.5)  # 6 prompts, 5 of them good
    assert step(made, 1)[0] == [2, 3, 4, 5] and made.num_kept == 0
    assert step(made, 2)[0] == [7, 8, 9, 10]
    made = sampler(tmp_path, dull=(1,), rounds=3, factor=1.5, surplus="keep")
    ids, _, draw = step(made, 1)
    assert ids == [2, 3, 4, 5] and draw.stats["dynamic/groups_kept"] == 1 and draw.stats["dynamic/groups_dropped"] == 1
    ids, samples, draw = step(made, 2)  # 3 missing: 5 prompts
    assert ids == [6, 7, 8, 9] and [s.version for s in samples[::8]] == [0, 1, 1, 1]
    assert draw.stats["dynamic/groups_generated"] == 5 and draw.stats["dynamic/groups_kept"] == 2


def test_the_end_of_the_data_ends_the_rounds(tmp_path):
    made = sampler(tmp_path, dull=(1, 2, 3, 4, 5), prompts=6, epochs=1, rounds=9)
    ids, _, draw = step(made, 1)
    assert ids == [6] and draw.rounds == 2 and made.data.left == 0 and made.data.exhausted


@pytest.mark.parametrize("stop_after", [1, 2, 3])
def test_a_resumed_run_goes_on_the_same_bit_for_bit(tmp_path, stop_after):
    settings = {"dull": range(1, 40, 3), "rounds": 3, "factor": 2, "surplus": "keep", "replay": "R3"}
    straight, first = sampler(tmp_path, **settings), sampler(tmp_path, **settings)
    wanted = [step(straight, number)[1] for number in range(1, 7)]
    for number in range(1, stop_after + 1):
        step(first, number)
    assert first.num_kept, "the case must have groups that wait"
    state = json.loads(json.dumps({"sampler": first.state_dict(), "data": first.data.state_dict()}))
    second = sampler(tmp_path, **settings)
    second.data.load_state_dict(state["data"])
    second.load_state_dict(state["sampler"])
    for number in range(stop_after + 1, 7):
        found = step(second, number)[1]
        assert [as_values(s) for s in found] == [as_values(s) for s in wanted[number - 1]]


def as_values(sample: Sample) -> dict:
    values = dataclasses.asdict(sample)
    assert values["routes"].dtype == torch.int16
    return values | {name: values[name].tolist() for name in ("response", "rollout_logp", "routes")}


def test_a_greedy_response_gives_the_baseline_and_is_not_trained_on(tmp_path):
    made = sampler(tmp_path, wanted=2, samples=3, advantage="remax")
    _, samples, draw = step(made, 1)
    assert made.rollout.calls == [(2, (0, 1), 1.0), (2, (0, 1), 0.0)]
    assert [(s.group, s.index) for s in samples] == [(0, 0), (0, 1), (0, 2), (1, 0), (1, 1), (1, 2)]
    greedy = {s.prompt.id: float(sample_seed((0, 1), s.prompt.id, 0) % 1000 % 2) for s in samples}  # as Letters and Rewards make it
    assert all(s.baseline == greedy[s.prompt.id] for s in samples)
    assert draw.stats["rollout/tokens"] == 8 and made.data.rates.records[0].times == 1


def test_pass_rates_are_kept_of_every_prompt_that_was_tried(tmp_path):
    made = sampler(tmp_path, dull=(1, 3), rounds=2)
    _, samples, _ = step(made, 1)
    by_hand = {2: [s.reward for s in samples if s.prompt.id == "p:2"]}
    assert made.data.rates.rate(0) == made.data.rates.rate(2) == 1.0
    assert made.data.rates.rate(1) == sum(by_hand[2]) / 8
    stats = made.data.stats()
    assert stats["data/pass_rate_mean"] == pytest.approx(sum(made.data.rates.rate(i) for i in range(6)) / 6)
    assert 0 < stats["data/p/reward"] <= 1 and "data/p/reward" not in made.data.stats()
