"""What two models on disk say to a prompt: a Hugging Face folder in transformers, anything else in Megatron, both in fp32."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from megaflow.convert.sources import HuggingFace, Source
from megaflow.types import PreflightError
from megaflow.weights.table import table

TOLERANCE = 1e-4  # of the largest logit; measured between transformers and Megatron on CPU: 0 for SmolLM2, 1.2e-6 for random tiny models


@dataclass
class Agreement:
    """gap      largest difference of two logits
    largest    of all logits, without sign
    words      the most likely next token, of each
    programs   that computed them
    """

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


def compare_logits(a: Source, b: Source, prompt: str) -> Agreement:
    """Each model is in memory whole, one after the other.

    Raises PreflightError when they do not make the same tokens of the prompt.
    """
    from transformers import AutoTokenizer

    tokenizers = [AutoTokenizer.from_pretrained(source.rest) for source in (a, b)]
    tokens = [tokenizer(prompt).input_ids for tokenizer in tokenizers]
    if tokens[0] != tokens[1]:
        raise PreflightError(f"the tokenizers of {a.path} and {b.path} make different tokens of the prompt: {tokens[0]} and {tokens[1]}")
    if not tokens[0]:
        raise PreflightError(f"the tokenizer of {a.path} makes no tokens of the prompt {prompt!r}")
    programs = ["transformers" if isinstance(source, HuggingFace) else "Megatron" for source in (a, b)]
    compute = {"transformers": _in_transformers, "Megatron": _in_megatron}
    logits = [compute[program](source, tokens[0]) for program, source in zip(programs, (a, b), strict=True)]
    words = [tokenizer.decode(found[-1].argmax()) for tokenizer, found in zip(tokenizers, logits, strict=True)]
    gap = float((logits[0] - logits[1]).abs().max())
    return Agreement(gap, float(logits[0].abs().max()), len(tokens[0]), words, programs)


@torch.no_grad()
def _in_transformers(source: Source, tokens: list[int]) -> Tensor:
    """[T, V]"""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(source.path, dtype=torch.float32).eval()
    return model(input_ids=torch.tensor([tokens])).logits[0]


def _in_megatron(source: Source, tokens: list[int]) -> Tensor:
    """[T, V] Of the model that a run would train, on one rank, filled from the files tensor by tensor."""
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
        return engine.logits_of(tokens)
    finally:
        mesh.close()
