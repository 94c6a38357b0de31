"""The prompts of a run: a training set in a saved, repeatable order, and eval sets apart from it."""

from __future__ import annotations

import hashlib
import json
import logging
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from itertools import chain
from typing import Any

from megaflow.config.schema import DataConfig, SourceConfig
from megaflow.data.order import Draws, Passes, shares
from megaflow.data.pass_rates import PassRates, known_rates
from megaflow.data.prompts import encode_records
from megaflow.data.sources import check_answers, read_source, source_name
from megaflow.types import ConfigError, PreflightError, Prompt, Stats

log = logging.getLogger(__name__)

HELDOUT = "heldout"  # name of the eval set that eval_fraction sets aside


class PromptStream:
    """Hands out prompts, `prompts_per_step` at a time unless told otherwise, the same on every rank. Reads and tokenises all when made.

    Joined sources are passed through epoch by epoch; a batch may span two epochs, and as long as the set is no smaller than a batch, no
    prompt comes twice in one. With weights each source has passes of its own. With data.curriculum=target prompts are drawn instead. There
    an epoch is as many prompts as the set has. With data.epochs set, a last batch that would be incomplete is not given.

    eval_sets  name -> prompts, in the file's order; with `heldout` when data.eval_fraction is set
    counts     set -> read, empty, too_long, kept; for training also heldout, for eval sets also in_train (the very same prompt)
    Raises ConfigError and PreflightError for files, lines and settings that cannot be used.
    """

    def __init__(self, config: DataConfig, tokenizer: Any, prompts_per_step: int, seed: int):
        self.config, self.prompts_per_step, self.seed = config, prompts_per_step, seed
        self.counts: dict[str, dict[str, int]] = {}
        self.eval_sets: dict[str, list[Prompt]] = {}
        _check_names(config)
        prompts = self._read("train", list(enumerate(config.train)), "data.train", tokenizer)
        for number, source in enumerate(config.eval):
            self._add_eval(source_name(source), self._read(source_name(source), [(number, source)], "data.eval", tokenizer))
        self._prompts = self._set_aside(prompts)
        self._count_overlap()
        self._check_enough()
        self.fingerprint = _fingerprint(self._prompts)
        self.rates = PassRates(config.pass_rate_memory, known_rates(self._prompts, config.pass_rate_key))
        self._index = {prompt.id: index for index, prompt in enumerate(self._prompts)}
        self._weights, self._orders = self._make_orders()
        self._handed = [0] * len(self._orders)
        self._rewards: dict[str, list[float]] = {}  # of each source, since stats() was last asked

    @property
    def num_prompts(self) -> int:
        """Training prompts in an epoch."""
        return len(self._prompts)

    @property
    def prompts(self) -> list[Prompt]:
        """The training prompts, in the files' order."""
        return [_with_list(prompt) for prompt in self._prompts]

    @property
    def epoch(self) -> int:
        """Of the last prompt handed out, from 0."""
        order = self._orders[0]
        return order.epoch if len(self._orders) == 1 else max(0, sum(self._handed) - 1) // self.num_prompts

    @property
    def left(self) -> int | None:
        """Prompts until data.epochs are over; None without an end."""
        if not self.config.epochs:
            return None
        order = self._orders[0]
        if len(self._orders) == 1 and isinstance(order, Passes):
            return order.left(self.config.epochs, self._skip(), self.prompts_per_step)
        return self.config.epochs * self.num_prompts - sum(self._handed)

    @property
    def exhausted(self) -> bool:
        """Whether data.epochs leaves too little for another batch."""
        return self.left is not None and self.left < self.prompts_per_step

    def next(self, count: int = 0) -> list[Prompt]:
        """The next `count` prompts (0: prompts_per_step). One that comes twice is "<id>#2", so that other samples are drawn for it."""
        count = count or self.prompts_per_step
        assert self.left is None or self.left >= count, f"next({count}) with {self.left} prompts left of {self.config.epochs} epochs"
        sources = shares(self._weights, self._handed, count)
        parts = [iter(order.take(sources.count(number), self._skip())) for number, order in enumerate(self._orders)]
        for number in range(len(self._orders)):
            self._handed[number] += sources.count(number)
        times: Counter[int] = Counter()
        taken = []
        for number in sources:
            index = next(parts[number])
            times[index] += 1
            taken.append(_handed_out(self._prompts[index], times[index]))
        return taken

    def record(self, prompt_id: str, pass_rate: float, reward: float) -> None:
        """What became of a prompt that was handed out: the part of its samples that was solved, and their mean reward."""
        index = self._index_of(prompt_id)
        self.rates.record(index, pass_rate)
        self._rewards.setdefault(_source_of(self._prompts[index]), []).append(reward)

    def prompt(self, prompt_id: str) -> Prompt:
        """The training prompt of this id."""
        return replace(_handed_out(self._prompts[self._index_of(prompt_id)], 1), id=prompt_id)

    def stats(self) -> Stats:
        """data/*; the rewards are those recorded since the last call."""
        found = {f"data/{source}/reward": sum(rewards) / len(rewards) for source, rewards in sorted(self._rewards.items())}
        self._rewards = {}
        mean = self.rates.mean()
        found |= {"data/epoch": float(self.epoch)} | ({} if mean is None else {"data/pass_rate_mean": mean})
        return found | ({"data/skipped": float(len(self._skip()))} if self.config.skip_solved else {})

    def state_dict(self) -> dict[str, Any]:
        """Positions and pass rates; JSON will hold it."""
        return self.state_dict_later()()

    def state_dict_later(self) -> Callable[[], dict[str, Any]]:
        """What `state_dict` says now, to be had later: to write down the pass rates of all prompts takes too long for every step."""
        positions, rates = self._positions(), self.rates.copy()
        return lambda: positions | {"rates": rates.state_dict()}

    def _positions(self) -> dict[str, Any]:
        return {
            "orders": [order.state_dict() for order in self._orders],
            "handed": list(self._handed),
            "num_prompts": self.num_prompts,
            "fingerprint": self.fingerprint,
            "settings": self._order_settings(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Goes on where `state` was taken; another prompts_per_step is fine. Raises PreflightError when the data or their order changed."""
        if state["fingerprint"] != self.fingerprint:
            raise PreflightError(
                f"the training prompts are not those of the checkpoint: {state['num_prompts']} then, {self.num_prompts} now, fingerprint "
                f"{state['fingerprint'][:12]} then, {self.fingerprint[:12]} now; restore the files and the data section, or start a new run"
            )
        for name, now in self._order_settings().items():
            then = state["settings"][name]
            if now != then:
                raise PreflightError(f"{name}={now}, but the checkpoint's order of prompts was made with {name}={then}; set it back")
        self.rates.load_state_dict(state["rates"])
        self._handed = list(state["handed"])
        for order, saved in zip(self._orders, state["orders"], strict=True):
            order.load_state_dict(saved)

    def _order_settings(self) -> dict[str, Any]:
        config = self.config
        weights = {f"data.train.{number}.weight": source.weight for number, source in enumerate(config.train)}
        return {"run.seed": self.seed, "data.shuffle": config.shuffle, "data.curriculum": config.curriculum, **weights}

    def _make_orders(self) -> tuple[list[float], list[Passes | Draws]]:
        """(weight, order) of each source; of all of them together when they are joined."""
        config = self.config
        if not any(source.weight for source in config.train):
            return [1.0], [self._make_order(list(range(self.num_prompts)), str(self.seed))]
        members: dict[str, list[int]] = {source_name(source): [] for source in config.train}
        for index, prompt in enumerate(self._prompts):
            members[_source_of(prompt)].append(index)
        for name, found in members.items():
            if not found:
                raise PreflightError(f"data.train: {name!r} has a weight and no usable prompt; leave the source out, or see why: "
                                     f"{self._why_left_out('train')}")  # fmt: skip
        return [s.weight for s in config.train], [self._make_order(found, f"{self.seed}/{name}") for name, found in members.items()]

    def _make_order(self, members: list[int], seed: str) -> Passes | Draws:
        config, rates = self.config, self.rates
        if config.curriculum == "target":
            return Draws(members, seed, lambda index: rates.worth(index, config.target_rate))
        return Passes(members, seed, config.shuffle, rates.rate if config.curriculum == "easy_to_hard" else None)

    def _skip(self) -> set[int]:
        return self.rates.solved(self.config.skip_solved)

    def _index_of(self, prompt_id: str) -> int:
        return self._index[prompt_id] if prompt_id in self._index else self._index[prompt_id.rpartition("#")[0]]

    def _read(self, name: str, sources: list[tuple[int, SourceConfig]], label: str, tokenizer: Any) -> list[Prompt]:
        keys = (self.config.prompt_key, self.config.answer_key)
        records = chain.from_iterable(read_source(source, f"{label}[{number}]", *keys) for number, source in sources)
        prompts, self.counts[name] = encode_records(check_answers(records, keys[1]), tokenizer, self.config)
        return prompts

    def _add_eval(self, name: str, prompts: list[Prompt]) -> None:
        if not prompts:
            raise PreflightError(f"eval set {name!r} has no usable prompt: {self._why_left_out(name)}")
        self.eval_sets[name] = [_with_list(prompt) for prompt in prompts]

    def _set_aside(self, prompts: list[Prompt]) -> list[Prompt]:
        """The training prompts without `heldout`. Equal prompts go to the same side, or training would see what is measured."""
        self.counts["train"]["heldout"] = 0
        if not self.config.eval_fraction or not prompts:
            return prompts
        wanted = max(1, round(self.config.eval_fraction * len(prompts)))
        copies = Counter(prompt.text for prompt in prompts)
        distinct = list(copies)
        random.Random(f"{self.seed}/{HELDOUT}").shuffle(distinct)
        chosen: set[str] = set()
        for text in distinct:
            if wanted <= 0:
                break
            chosen.add(text)
            wanted -= copies[text]
        self._add_eval(HELDOUT, [prompt for prompt in prompts if prompt.text in chosen])
        number = len(self.eval_sets[HELDOUT])
        self.counts["train"].update(heldout=number, kept=len(prompts) - number)
        self.counts[HELDOUT] = {"read": number, "empty": 0, "too_long": 0, "kept": number}
        return [prompt for prompt in prompts if prompt.text not in chosen]

    def _count_overlap(self) -> None:
        seen = {prompt.text for prompt in self._prompts}
        for name, prompts in self.eval_sets.items():
            number = sum(prompt.text in seen for prompt in prompts)
            self.counts[name]["in_train"] = number
            if number:
                log.warning("eval set %s: %d of its %d prompts are also trained on, flattering its accuracy", name, number, len(prompts))

    def _check_enough(self) -> None:
        if not self._prompts:
            raise PreflightError(f"no prompt to train on: {self._why_left_out('train')}")
        epochs, have = self.config.epochs, self.num_prompts
        if epochs and epochs * have < self.prompts_per_step:
            raise PreflightError(
                f"data.epochs={epochs} of {have} prompts are fewer than the {self.prompts_per_step} of one step "
                f"(rollout.prompts_per_step); lower that, or set data.epochs to 0 or at least {-(-self.prompts_per_step // have)}"
            )

    def _why_left_out(self, name: str) -> str:
        counts, limit = self.counts[name], self.config.max_prompt_tokens
        text = f"{counts['read']} read, {counts['empty']} empty, {counts['too_long']} longer than data.max_prompt_tokens={limit}"
        if counts.get("heldout"):
            text += f", {counts['heldout']} set aside by data.eval_fraction={self.config.eval_fraction}"
        return text


def _with_list(prompt: Prompt) -> Prompt:
    return replace(prompt, tokens=list(prompt.tokens))


def _handed_out(prompt: Prompt, times: int) -> Prompt:
    """The caller's own copy, `times` being how often the batch has it by now."""
    return replace(prompt, tokens=list(prompt.tokens), id=prompt.id if times == 1 else f"{prompt.id}#{times}")


def _source_of(prompt: Prompt) -> str:
    return prompt.id.rpartition(":")[0]


def _fingerprint(prompts: list[Prompt]) -> str:
    digest = hashlib.sha256()
    for prompt in prompts:
        digest.update(json.dumps([prompt.id, prompt.text, prompt.answer], default=str).encode())
        digest.update(prompt.tokens.tobytes())
    return digest.hexdigest()


def _check_names(config: DataConfig) -> None:
    if not config.train:
        raise ConfigError("data.train is empty; name at least one source, e.g. data.train=[{path: prompts.jsonl}]")
    for key, sources in (("train", config.train), ("eval", config.eval)):
        for name, times in Counter(source_name(source) for source in sources).items():
            if times > 1:
                raise ConfigError(f"data.{key}: {times} sources are called {name!r}; give each its own `name`")
    reserved = {HELDOUT, "train"} & {source_name(source) for source in config.eval}
    if reserved:
        raise ConfigError(f"data.eval: the name {min(reserved)!r} is taken; give the source another `name`")
