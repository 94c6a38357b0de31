"""The mathematics of the algorithms: pure tensor functions, no process group, no model, no I/O.

An algorithm is found by name, or as "package.module:function" for one of your own. Importing this package loads no torch.
"""

from __future__ import annotations

from megaflow.registry import Registry

# fn(rewards[N], groups[N], cfg: AlgoConfig) -> advantages[N]. fn.needs_tokens says what it reads; where fn.needs_lengths is True,
# it is also given lengths=[N] int64, each sample's response tokens; where fn.needs_greedy is True, baseline=[N], the reward of the prompt's
# greedy response, which the rollout then generates beside the samples.
ADVANTAGES = Registry("advantage")
for _name in ("grpo", "rloo", "opo", "gpg", "reinforce_pp", "reinforce_pp_baseline"):
    ADVANTAGES.register(_name, f"megaflow.algo.advantages:{_name}")
ADVANTAGES.register("pass_at_k", "megaflow.algo.pass_at_k:pass_at_k")
ADVANTAGES.register("remax", "megaflow.algo.remax:remax")
ADVANTAGES.register("gae", "megaflow.algo.gae:gae")

# An estimator with needs_tokens = True is fn(rewards[N], groups[N], cfg, tokens: TokenInputs) -> TokenAdvantages (megaflow.algo.tokens);
# with needs_values = True too, a critic is trained beside the policy.

LOSSES = Registry("loss")  # fn(logp[R], inputs: LossInputs, cfg: AlgoConfig) -> (per_token[R], stats of [R])
for _name in ("ppo_clip", "dual_clip", "policy_gradient", "gspo", "cispo", "sapo", "clip_cov", "kl_cov"):
    LOSSES.register(_name, f"megaflow.algo.losses:{_name}")
