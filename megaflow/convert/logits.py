"""What two models on disk say to a prompt, in fp32: one of them in transformers and one in Megatron, unless both are Hugging Face's."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megaflow.convert.sources import HuggingFace, Source
from megaflow.types import PreflightError
from megaflow.weights.table import table

TOLERANCE = 1e-4  # of the largest logit; measured between transformers and Megatron on CPU: 0 for SmolLM2, 1.2e-6 for random tiny models


@dataclass
class Agreement:
    """prompt   that both were given
    gap        largest difference of two logits
    largest    of all logits, without sign
    words      the most likely next token, of each
    programs   that computed them
    """

    prompt: str
    gap: float
    largest: float
    num_tokens: int
    words: list[str]
    programs: list[str]

    @property
    def good(self) -> bool:
        """Equal to what fp32 rounds away; exactly, where one program computed both."""
        allowed = 0.0 if self.programs[0] == self.programs[1] else TOLERANCE * self.largest
        return self.gap <= allowed


def compare_logits(a: Source, b: Source, prompts: list[str]) -> list[Agreement]:
    """One for each prompt. Each model is in memory whole, one after the other.

    Raises PreflightError when they do not make the same tokens of a prompt.
    """
    from transformers import AutoTokenizer

    tokenizers = [AutoTokenizer.from_pretrained(source.rest) for source in (a, b)]
    tokens = []
    for prompt in prompts:
        ours, theirs = (tokenizer(prompt).input_ids for tokenizer in tokenizers)
        if ours != theirs:
            raise PreflightError(f"the tokenizers of {a.path} and {b.path} make different tokens of {prompt!r}: {ours} and {theirs}")
        if not ours:
            raise PreflightError(f"the tokenizer of {a.path} makes no tokens of the prompt {prompt!r}")
        tokens.append(ours)
    programs = programs_for(a, b)
    compute = {"transformers": _in_transformers, "Megatron": _in_megatron}
    logits = [compute[program](source, tokens) for program, source in zip(programs, (a, b), strict=True)]
    found = []
    for prompt, of_prompt, one, other in zip(prompts, tokens, *logits, strict=True):
        words = [tokenizer.decode(each[-1].argmax()) for tokenizer, each in zip(tokenizers, (one, other), strict=True)]
        found.append(Agreement(prompt, float((one - other).abs().max()), float(one.abs().max()), len(of_prompt), words, programs))
    return found


def programs_for(a: Source, b: Source) -> list[str]:
    """Of two that Megatron would both compute the first is built in transformers, from its config.json: a program cannot judge itself."""
    programs = ["transformers" if isinstance(source, HuggingFace) else "Megatron" for source in (a, b)]
    return ["transformers", "Megatron"] if programs == ["Megatron", "Megatron"] else programs


@torch.no_grad()
def _in_transformers(source: Source, prompts: list[list[int]]) -> list[Tensor]:
    """[T, V] each."""
    from transformers import AutoModelForCausalLM

    whole = AutoModelForCausalLM.from_pretrained(source.path, dtype=torch.float32) if isinstance(source, HuggingFace) else _filled(source)
    model = whole.eval()
    return [model(input_ids=torch.tensor([tokens])).logits[0] for tokens in prompts]


def _filled(source: Source) -> Any:
    """transformers' model of the source's config.json with the source's tensors."""
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.from_pretrained(source.rest)
    with torch.device("meta"):
        kind = type(AutoModelForCausalLM.from_config(config))
    tensors = {name: t for row in table(source.shape) for name, t in zip(row.hf, source.read(row), strict=True)}
    model, said = kind.from_pretrained(None, config=config, state_dict=tensors, dtype=torch.float32, output_loading_info=True)
    if lacking := sorted(said["missing_keys"]):
        raise PreflightError(f"{source.path}: transformers finds no tensor for {len(lacking)} of the model's, e.g. {lacking[0]}")
    return model


def _in_megatron(source: Source, prompts: list[list[int]]) -> list[Tensor]:
    """[T, V] each. Of the model that a run would train, on one rank, filled from the files tensor by tensor."""
    from megaflow.actor.logits import LogitsEngine
    from megaflow.config.schema import Config, ModelConfig
    from megaflow.parallel.mesh import Mesh

    config = Config(model=ModelConfig(path=str(source.rest), dtype="float32"))
    mesh = Mesh.create(config.parallel)
    try:
        engine = LogitsEngine(source.shape, config, mesh)
        rows = {row.megatron: row for row in table(source.shape)}
        with torch.no_grad():
            for name, parameter in engine.parameters.items():
                row = rows[name]
                parameter.copy_(row.kind.split(source.read(row), 1, 0, source.shape))
        return [engine.logits_of(tokens) for tokens in prompts]
    finally:
        mesh.close()
