"""Tokens/s of an update on a long-tailed mix of lengths: sequences packed, against each padded to the longest.

    python tools/bench/packing.py models/bench-1.5b

The mix: log-normal response lengths (median 512, sigma 0.9) cut at 8,192, prompts of 128. Padding is counted as cost and never as tokens:
the padded run has the same real tokens, and every sequence as long as the longest.
"""

from __future__ import annotations

import random
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent.parent))

from tools.bench import actor_alone as alone

PROMPT, MEDIAN, SIGMA, LONGEST = 128, 512, 0.9, 8192


def main() -> None:
    parser = alone.arguments("packed against padded")
    parser.add_argument("--sequences", type=int, default=64)
    parser.set_defaults(repeats=3)
    parser.add_argument("--longest", type=int, default=LONGEST)
    options = parser.parse_args()
    rng = random.Random(0)
    drawn = [max(1, min(options.longest, round(rng.lognormvariate(0, SIGMA) * MEDIAN))) for _ in range(options.sequences)]
    longest = max(drawn)

    cfg, mesh, actor = alone.build(options.folder, options.overrides)
    seconds = {}
    for name, responses in (("packed", drawn), ("padded", [longest] * len(drawn))):
        samples = alone.made_samples([(PROMPT, n) for n in responses], actor.shape.vocab_size)
        mine = alone.spread(samples, mesh, actor)
        seconds[name] = alone.median_seconds(mesh, lambda mine=mine: alone.update(actor, cfg, mine), options.repeats, warm_up=1)
    real = sum(drawn) + PROMPT * len(drawn)
    figures = {
        "sequences": len(drawn),
        "mean_response": sum(drawn) / len(drawn),
        "longest_response": longest,
        "padding_of_padded": 1 - real / (len(drawn) * (PROMPT + longest)),
        **{f"{name}_tokens_per_s": real / s for name, s in seconds.items()},
        "packed_over_padded": seconds["padded"] / seconds["packed"],
        "peak_gb": alone.peak_gb(),
    }
    alone.report(mesh, options, figures)


if __name__ == "__main__":
    main()
