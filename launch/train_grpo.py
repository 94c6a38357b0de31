"""Train a policy with GRPO: Megatron-core holds it, SGLang generates, rewards are Python functions.

torchrun --nproc-per-node 2 launch/train_grpo.py --config yaml/quickstart.yaml
python launch/train_grpo.py --config yaml/quickstart.yaml --dry-run
"""

from megaflow.cli import main

if __name__ == "__main__":  # the engine's processes import this file
    main("megaflow.trainer.loop:train", __doc__)
