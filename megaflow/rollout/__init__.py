"""Generation: engines that the ranks own. Importing this package loads no engine."""

from __future__ import annotations

from megaflow.registry import Registry

BACKENDS = Registry("rollout backend")  # factory(config: Config, mesh: Mesh, tokenizer, stop_token_ids) -> Rollout
BACKENDS.register("sglang", "megaflow.rollout.sglang:SGLangRollout")
BACKENDS.register("hf", "megaflow.rollout.hf:HFRollout")
