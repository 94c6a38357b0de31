"""Tokens/s of SGLangRollout.generate against the same engine's own batched generate, with nothing of ours around it, in turns.

    python tools/bench/make_model.py qwen2.5-1.5b models/bench-1.5b
    python tools/bench/rollout.py models/bench-1.5b

Both get the same random prompts, new ones each time, and always generate --new tokens. `bare` is timed in the engine's process, around
one call for all prompts; `ours` in the rank, from the prompts to the samples with their text. Log-probabilities are asked for in both;
`bare_without_logprobs` shows what they cost. On a CPU: --prompts 8 --new 16.
"""

from __future__ import annotations

import dataclasses
import random
import statistics
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent.parent))

from tools.bench import engine_alone as alone


def main() -> None:
    parser = alone.arguments(__doc__)
    parser.add_argument("--prompts", type=int, default=256)
    parser.add_argument("--length", type=int, default=128, help="tokens of a prompt")
    parser.add_argument("--new", type=int, default=512, help="tokens of a response")
    options = parser.parse_intermixed_args()
    settings = [f"sampling.max_new_tokens={options.new}", "sampling.ignore_eos=true", f"rollout.max_running={options.prompts}"]
    cfg, mesh, rollout = alone.build(options.folder, [*settings, *options.overrides])
    rollout.version = 0  # random weights are as good as any here
    seconds = measured(cfg, mesh, rollout, options)
    tokens = options.prompts * options.new
    figures = {"prompts": options.prompts, "new_tokens": options.new}
    figures |= {f"{name}_tokens_per_s": tokens / statistics.median(each) for name, each in seconds.items()}
    figures["ours_over_bare"] = statistics.median(seconds["bare"]) / statistics.median(seconds["ours"])
    figures["ours_over_bare_each_turn"] = [round(b / o, 4) for b, o in zip(seconds["bare"], seconds["ours"], strict=True)]
    if mesh.rank == 0:
        alone.report("rollout", options, figures)
    rollout.close()
    mesh.close()


def measured(cfg, mesh, rollout, options) -> dict[str, list[float]]:
    """Seconds by way, --repeats of each in turns after one turn that warms up."""
    seconds: dict[str, list[float]] = {"bare": [], "ours": [], "bare_without_logprobs": []}
    for turn in range(options.repeats + 1):
        prompts = made_prompts(options.prompts, options.length, len(rollout.tokenizer), turn)
        found = {
            "bare": bare(rollout, prompts, cfg, True),
            "ours": ours(rollout, prompts, cfg, turn),
            "bare_without_logprobs": bare(rollout, prompts, cfg, False),
        }
        for name, value in found.items():
            if turn:
                seconds[name].append(value)
    return seconds


def made_prompts(number: int, length: int, vocab: int, seed: int) -> list:
    from megaflow.types import Prompt

    draw = random.Random(seed)
    return [Prompt(f"bench:{i}", [draw.randrange(3, vocab) for _ in range(length)], "") for i in range(number)]


def bare(rollout, prompts: list, cfg, with_logprobs: bool) -> float:
    forget(rollout)
    params = [rollout._params(cfg.sampling, i) for i in range(len(prompts))]
    call = rollout.engine.call("plain_generate", [p.tokens for p in prompts], params, with_logprobs)
    seconds, tokens = rollout.engine.wait(call, cfg.rollout.timeout_s, "bare generation")
    assert tokens == len(prompts) * cfg.sampling.max_new_tokens, tokens
    return seconds


def ours(rollout, prompts: list, cfg, turn: int) -> float:
    forget(rollout)
    start = time.perf_counter()
    samples = rollout.generate(prompts, dataclasses.replace(cfg.sampling), (0, turn), 1, 0)
    seconds = time.perf_counter() - start
    assert sum(s.num_response for s in samples) == len(prompts) * cfg.sampling.max_new_tokens
    return seconds


def forget(rollout) -> None:
    """An empty KV cache, as at the beginning of each step: no prompt is known from the turn before."""
    rollout.engine.release(["kv_cache"])
    rollout.engine.resume(["kv_cache"])


if __name__ == "__main__":  # the engine's processes import this file
    main()
