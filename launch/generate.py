"""Generate from a model or a checkpoint (run.resume) for every prompt of data.train, score, and write a file: samples, pairs, SFT data.

torchrun --nproc-per-node 2 launch/generate.py --config yaml/quickstart.yaml generate.kind=sft generate.output=data/sums_sft.jsonl
"""

from megaflow.cli import main

if __name__ == "__main__":  # the engine's processes import this file
    main("megaflow.trainer.generate:generate_run", __doc__, purpose="generate")
