"""The nouns that every part shares, and the one legend of dimensions.

    N samples   G groups (one a prompt)   T tokens of a sequence or a pack   R response tokens   V vocabulary   L layers   H hidden
    L_moe layers with experts   K experts that a router chooses for a token
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:  # the command line imports this file and must answer without loading torch
    import torch

FinishReason = Literal["stop", "length"]


@dataclass
class Prompt:
    """One question, already in tokens.

    id      stable over epochs and runs: "<data set>:<line>"
    tokens  the prompt after the chat template, without padding
    text    what the tokens say
    answer  whatever the reward function compares with (any JSON value)
    meta    the rest of the data set's line
    asked   the question before the policy's chat template: a string or a list of messages; for models with another template
    """

    id: str
    tokens: list[int]
    text: str
    answer: Any = None
    meta: dict[str, Any] = field(default_factory=dict)
    asked: Any = None


@dataclass
class Sample:
    """One sequence: a prompt, a response and all that is known of it. A rank holds a list of them.

    Token-level tensors cover the response only, [R]; they are None until the phase that fills them. So are routes, of all tokens.
    """

    prompt: Prompt
    group: int  # number of the prompt within the step
    index: int  # number of the sample within its group
    response: torch.Tensor | None  # [R] int64
    rollout_logp: torch.Tensor | None  # [R] fp32, as the engine sampled it (temperature applied)
    finish: FinishReason
    version: int  # of the weights that generated it
    text: str = ""  # the response, decoded
    old_logp: torch.Tensor | None = None  # [R] fp32, the trainer's own, before the update
    ref_logp: torch.Tensor | None = None  # [R] fp32, the reference model's
    marked: torch.Tensor | None = None  # [R] bool, the tokens that the loss's `choice` has picked (algo/covariance.py)
    values: torch.Tensor | None = None  # [R] fp32, the critic's before the update: what it expects before each response token
    returns: torch.Tensor | None = None  # [R] fp32, what the critic learns to expect
    routes: torch.Tensor | None = None  # [T - 1, L_moe, K] uint8 or int16, the engine's experts; its last token was never fed
    reward: float = 0.0
    reward_parts: dict[str, float] = field(default_factory=dict)  # by reward function, unweighted
    baseline: float = 0.0  # reward of the prompt's greedy response, for advantage functions that need it
    advantage: float | torch.Tensor = 0.0  # one number, or [R] when the estimator is token-level
    mini_batch: int = 0  # which optimizer step of the update it belongs to
    sums: dict[str, float] = field(default_factory=dict)  # per-sequence numbers that a rank has summed over its tokens
    num_response: int = 0  # R; stays when the tensors do not travel

    def __post_init__(self) -> None:
        if self.response is not None:
            self.num_response = len(self.response)

    @property
    def num_tokens(self) -> int:
        """Prompt and response, T."""
        return len(self.prompt.tokens) + self.num_response

    def without_tokens(self) -> Sample:
        """The same sample without its token-level tensors: what travels to rank 0."""
        tokens = ("response", "rollout_logp", "old_logp", "ref_logp", "values", "returns", "marked", "routes")
        return dataclasses.replace(self, **dict.fromkeys(tokens))

    def without_routes(self) -> Sample:
        """The same sample for who reads its tokens and runs no router: routes are most of a sample's bytes."""
        return self if self.routes is None else dataclasses.replace(self, routes=None)


Stats = dict[str, float]  # metric name -> value, e.g. {"train/kl": 0.01}


class UserError(Exception):
    """A mistake that the user can mend. Printed without a traceback; `exit_code` as documented in docs/running.md."""

    exit_code = 1


class ConfigError(UserError):
    """The configuration contradicts itself or names something that does not exist (exit code 2)."""

    exit_code = 2


class PreflightError(UserError):
    """The configuration is sound, but this machine, file or model does not fit it (exit code 3)."""

    exit_code = 3


class DivergedError(UserError):
    """Training left the region where going on makes sense (exit code 4)."""

    exit_code = 4


class LostError(UserError):
    """Something that a run needs went away and did not come back in time: engines, a reward service, the storage (exit code 5)."""

    exit_code = 5


class StalledError(UserError):
    """No rank moves any more (exit code 6). Nobody raises it: the main threads are stuck, and the watchdog ends their processes."""

    exit_code = 6


class MendableError(RuntimeError):
    """Something that ranks which meet it together can put right and go on. It keeps its type on its way to the other ranks."""


@dataclass(frozen=True)
class Layout:
    """How an engine wants its weights: part `rank` of `tp`; `fused` joins q, k, v and gate, up as SGLang stores them.

    ep   1: every expert is cut over tp; equal to tp: each worker has its own experts whole
    """

    tp: int = 1
    rank: int = 0
    fused: bool = False
    ep: int = 1
