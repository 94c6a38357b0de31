"""The mathematics of the algorithms: pure tensor functions, no process group, no model, no I/O.

An algorithm is found by name, or as "package.module:function" for one of your own. Importing this package loads no torch.
"""

from __future__ import annotations

from megaflow.registry import Registry

ADVANTAGES = Registry("advantage")  # fn(rewards[N], groups[N], cfg: AlgoConfig) -> advantages[N]; fn.needs_tokens says what it reads
ADVANTAGES.register("grpo", "megaflow.algo.advantages:grpo")

LOSSES = Registry("loss")  # fn(logp[R], inputs: LossInputs, cfg: AlgoConfig) -> (per_token[R], stats of [R])
LOSSES.register("ppo_clip", "megaflow.algo.losses:ppo_clip")
