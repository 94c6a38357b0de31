"""What generate writes of a prompt's samples: all, the best, a pair, or those worth imitating. Plain functions; one dict is one line."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from megaflow.config.schema import GenerateConfig
from megaflow.types import Sample

Line = dict[str, Any]


def all_samples(group: list[Sample], cfg: GenerateConfig, temperature: float) -> list[Line]:
    return [stored_line(s, temperature) for s in group]


def best_of_n(group: list[Sample], cfg: GenerateConfig, temperature: float) -> list[Line]:
    """The sample of highest reward, with `of`: out of how many."""
    return [stored_line(by_reward(group)[0], temperature) | {"of": len(group)}]


def pairs(group: list[Sample], cfg: GenerateConfig, temperature: float) -> list[Line]:
    """The best and the worst, if their rewards are at least generate.margin apart."""
    ranked = by_reward(group)
    best, worst = ranked[0], ranked[-1]
    margin = best.reward - worst.reward
    if margin < cfg.margin:
        return []
    common = {k: v for k, v in stored_line(best, temperature).items() if k in PROMPT_KEYS}
    return [common | {"margin": margin} | _side("chosen", best) | _side("rejected", worst)]


def sft(group: list[Sample], cfg: GenerateConfig, temperature: float) -> list[Line]:
    """Rejection sampling: the best generate.per_prompt different responses whose reward is at least generate.threshold."""
    kept: dict[str, Sample] = {}
    for s in by_reward(group):
        if s.reward >= cfg.threshold:
            kept.setdefault(s.text, s)
    return [stored_line(s, temperature) for s in list(kept.values())[: cfg.per_prompt]]


KINDS: dict[str, Callable[[list[Sample], GenerateConfig, float], list[Line]]] = {
    "samples": all_samples,
    "best_of_n": best_of_n,
    "pairs": pairs,
    "sft": sft,
}
PROMPT_KEYS = ("id", "prompt", "answer", "meta", "version", "temperature", "prompt_ids")


def by_reward(group: list[Sample]) -> list[Sample]:
    """Best first; of equals the one that was drawn first."""
    return sorted(group, key=lambda s: (-s.reward, s.index))


def stored_line(sample: Sample, temperature: float) -> Line:
    """A sample with all that training from it needs: its tokens and the log-probabilities that they were drawn with."""
    assert sample.response is not None and sample.rollout_logp is not None, "its tensors have not travelled"
    meta = {"meta": sample.prompt.meta} if sample.prompt.meta else {}
    return {
        "id": sample.prompt.id,
        "index": sample.index,
        "prompt": sample.prompt.text,
        "response": sample.text,
        "answer": sample.prompt.answer,
        **meta,
        "reward": float(sample.reward),
        "parts": sample.reward_parts,
        "finish": sample.finish,
        "version": sample.version,
        "temperature": temperature,
        "prompt_ids": list(sample.prompt.tokens),
        "response_ids": sample.response.tolist(),
        "rollout_logp": [float(f"{x:.9g}") for x in sample.rollout_logp.tolist()],  # nine digits give every fp32 number back
    }


def _side(name: str, sample: Sample) -> Line:
    assert sample.response is not None
    return {
        name: sample.text,
        f"{name}_reward": float(sample.reward),
        f"{name}_finish": sample.finish,
        f"{name}_ids": sample.response.tolist(),
    }


def first_of_each() -> Callable[[Line], bool]:
    """True for the first line with its prompt and response: a data set may hold a question twice."""
    seen: set[tuple[str, str]] = set()

    def is_first(line: Line) -> bool:
        key = (line["prompt"], line["response"])
        is_new = key not in seen
        seen.add(key)
        return is_new

    return is_first
