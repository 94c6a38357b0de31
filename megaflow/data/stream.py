"""The prompts of a run: a training set in a saved, repeatable order, and eval sets apart from it."""

from __future__ import annotations

import hashlib
import json
import logging
import random
from collections import Counter
from dataclasses import replace
from itertools import chain
from typing import Any

from megaflow.config.schema import DataConfig, SourceConfig
from megaflow.data.prompts import encode_records
from megaflow.data.sources import check_answers, read_source, source_name
from megaflow.types import ConfigError, PreflightError, Prompt

log = logging.getLogger(__name__)

HELDOUT = "heldout"  # name of the eval set that eval_fraction sets aside


class PromptStream:
    """Hands out `prompts_per_step` prompts at a time, the same on every rank. Reads and tokenises everything when made.

    A step's batch may span two epochs; as long as the set is no smaller than a batch, no prompt comes twice in one. With data.epochs set,
    a last batch that would be incomplete is not given.

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
        self._begin_epoch(0, avoid=[], ahead=0)

    @property
    def num_prompts(self) -> int:
        """Training prompts in an epoch."""
        return len(self._prompts)

    @property
    def epoch(self) -> int:
        """Of the last prompt handed out, from 0."""
        return self._epoch

    @property
    def exhausted(self) -> bool:
        """Whether data.epochs leaves too little for another batch."""
        if not self.config.epochs:
            return False
        left = (self.config.epochs - self._epoch) * self.num_prompts - self._position
        return left < self.prompts_per_step

    def next(self) -> list[Prompt]:
        """The prompts of the next step."""
        assert not self.exhausted, f"next() after {self.config.epochs} epochs"
        taken: list[int] = []
        while len(taken) < self.prompts_per_step:
            if self._position == self.num_prompts:
                self._begin_epoch(self._epoch + 1, avoid=list(taken), ahead=self.prompts_per_step - len(taken))
            part = self._order[self._position : self._position + self.prompts_per_step - len(taken)]
            self._position += len(part)
            taken += part
        return [_with_list(self._prompts[index]) for index in taken]

    def state_dict(self) -> dict[str, Any]:
        """The cursor; JSON will hold it."""
        return {
            "epoch": self._epoch,
            "position": self._position,
            "avoid": self._avoid,
            "ahead": self._ahead,
            "seed": self.seed,
            "shuffle": self.config.shuffle,
            "num_prompts": self.num_prompts,
            "fingerprint": self.fingerprint,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Goes on where `state` was taken; another prompts_per_step is fine. Raises PreflightError when the data or their order changed."""
        if state["fingerprint"] != self.fingerprint:
            raise PreflightError(
                f"the training prompts are not those of the checkpoint: {state['num_prompts']} then, {self.num_prompts} now, fingerprint "
                f"{state['fingerprint'][:12]} then, {self.fingerprint[:12]} now; restore the files and the data section, or start a new run"
            )
        for name, now, then in (("run.seed", self.seed, state["seed"]), ("data.shuffle", self.config.shuffle, state["shuffle"])):
            if now != then:
                raise PreflightError(f"{name}={now}, but the checkpoint's order of prompts was made with {name}={then}; set it back")
        self._begin_epoch(state["epoch"], avoid=list(state["avoid"]), ahead=state["ahead"])
        self._position = state["position"]

    def _begin_epoch(self, epoch: int, avoid: list[int], ahead: int) -> None:
        self._epoch, self._position, self._avoid, self._ahead = epoch, 0, avoid, ahead
        order = list(range(self.num_prompts))
        if self.config.shuffle:
            random.Random(f"{self.seed}/{epoch}").shuffle(order)  # the standard library keeps this sequence from version to version
        self._order = _without_repeats(order, set(avoid), ahead)

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


def _without_repeats(order: list[int], avoid: set[int], ahead: int) -> list[int]:
    """`order` with its first `ahead` places free of `avoid`, as far as there are enough others.

    `avoid` is what the batch that crosses the border of two epochs already holds, `ahead` what it still needs.
    """
    others = [index for index in order if index not in avoid] if avoid else order
    if len(others) < ahead or not avoid:
        return order
    first = set(others[:ahead])
    return others[:ahead] + [index for index in order if index not in first]


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
