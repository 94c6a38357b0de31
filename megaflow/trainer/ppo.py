"""PPO's entry: the training loop, once it is sure that there is a critic to train."""

from __future__ import annotations

from megaflow.config.schema import Config
from megaflow.trainer.critic import needs_critic
from megaflow.trainer.loop import train
from megaflow.types import ConfigError


def train_ppo(cfg: Config) -> None:
    """Collective. Train as configured; raises ConfigError when the advantage estimator has no use for a critic."""
    if not needs_critic(cfg):
        raise ConfigError(
            f"algo.advantage={cfg.algo.advantage} reads no values, so there is no critic to train; "
            "set algo.advantage=gae, or use launch/train_grpo.py"
        )
    train(cfg)
