"""Train from stored data (data.rollouts) for offline.steps steps: off-policy RL, SFT or DPO; what is left of run.steps is online RL.

torchrun --nproc-per-node 2 launch/train_offline.py --config yaml/quickstart_sft.yaml
"""

from megaflow.cli import main

if __name__ == "__main__":  # the engine's processes import this file
    main("megaflow.trainer.loop:train", __doc__, purpose="offline")
