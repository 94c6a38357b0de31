"""Train a policy with PPO: beside the policy a critic learns what reward to expect, and GAE says which tokens did better.

torchrun --nproc-per-node 2 launch/train_ppo.py --config yaml/quickstart_ppo.yaml
python launch/train_ppo.py --config yaml/quickstart_ppo.yaml --dry-run
"""

from megaflow.cli import main

if __name__ == "__main__":  # the engine's processes import this file
    main("megaflow.trainer.ppo:train_ppo", __doc__)
