"""Measure a model or a checkpoint (run.resume) on the sets of data.eval, without training.

torchrun --nproc-per-node 2 launch/evaluate.py --config yaml/quickstart.yaml run.resume=runs/quickstart/checkpoints/step_000030
"""

from megaflow.cli import main

if __name__ == "__main__":  # the engine's processes import this file
    main("megaflow.trainer.evaluate:evaluate_run", __doc__, purpose="evaluate")
