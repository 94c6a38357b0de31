"""How far the engine's log-probabilities are from the trainer's with the same weights, and where it comes from.

    python tools/bench/make_model.py qwen2.5-1.5b models/bench-1.5b
    python tools/bench/mismatch.py models/bench-1.5b

The same sampled tokens are scored three times: by the engine while it generates, by the trainer, and by transformers in fp32 with the
same (16-bit) weights. If engine and trainer each differ from fp32 by what 16-bit arithmetic rounds away, and independently, then they
differ from one another by about the root of the sum of both squares: `independent` is that figure, of root mean squares, and
`rms_over_independent` is near 1 when rounding explains all. On a CPU: --prompts 4 --new 16 rollout.backend=hf.

--replay, for a model with experts: the trainer scores a second time, its tokens sent to the experts that the engine chose
(actor.router_replay=R3): `engine_replayed` beside `engine_trainer`, and `routes_differ`, the part of the routes that it would not choose.
"""

from __future__ import annotations

import math
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent.parent))

from tools.bench import engine_alone as alone
from tools.bench.rollout import made_prompts


def main() -> None:
    parser = alone.arguments(__doc__)
    parser.add_argument("--prompts", type=int, default=64)
    parser.add_argument("--length", type=int, default=128, help="tokens of a prompt")
    parser.add_argument("--new", type=int, default=512, help="tokens of a response")
    parser.add_argument("--replay", action="store_true", help="also with the engine's routes, for a model with experts")
    options = parser.parse_intermixed_args()
    mesh, vocab, samples, trainer, replayed, routes = sampled(options)
    if mesh.rank == 0:
        engine = [s.rollout_logp for s in samples]
        exact = in_fp32(options.folder, samples)
        figures = {"prompts": options.prompts, "tokens": sum(s.num_response for s in samples), "vocabulary": vocab, **routes}
        pairs = {"engine_trainer": (engine, trainer), "engine_fp32": (engine, exact), "trainer_fp32": (trainer, exact)}
        if replayed is not None:
            pairs["engine_replayed"] = (engine, replayed)
        for name, (a, b) in pairs.items():
            figures |= {f"{name}_{kind}": value for kind, value in difference(a, b).items()}
        figures["independent"] = math.hypot(figures["engine_fp32_rms"], figures["trainer_fp32_rms"])
        figures["rms_over_independent"] = figures["engine_trainer_rms"] / figures["independent"] if figures["independent"] else 0.0
        alone.report("mismatch", options, figures)
    mesh.close()


def sampled(options):
    """(mesh, vocabulary, samples, the trainer's log-probability of each response token [R] by sample, the same with the engine's routes
    or None, figures of the routes); after one sync, the engine ended."""
    from megaflow.config.caches import use_cache_dir
    from megaflow.config.loading import load

    settings = [f"sampling.max_new_tokens={options.new}", "sampling.ignore_eos=true", "rollout.mem_fraction=0.4"]
    settings += ["actor.router_replay=R3"] if options.replay else []
    cfg = load(None, [f"model.path={options.folder}", *settings, *options.overrides]).config
    use_cache_dir(cfg.run.cache_dir)
    from megaflow.data import load_tokenizer
    from megaflow.parallel.mesh import Mesh
    from megaflow.rollout import BACKENDS
    from megaflow.trainer.build import build_actor, stop_token_ids
    from megaflow.trainer.sync import Sync

    mesh = Mesh.create(cfg.parallel, cfg.rollout.tp, cfg.run.timeout_s)
    tokenizer = load_tokenizer(options.folder)
    rollout = BACKENDS.get(cfg.rollout.backend)(cfg, mesh, tokenizer, stop_token_ids(options.folder, tokenizer))
    actor = build_actor(cfg, mesh)
    Sync(cfg, mesh, actor, rollout)(0)
    prompts = made_prompts(options.prompts, options.length, min(len(tokenizer), actor.shape.vocab_size), 0)
    samples = rollout.generate(prompts, cfg.sampling, (0, 1), 1, 0, **({"routes": True} if options.replay else {}))
    rollout.sleep(2)
    actor.wake()
    samples = mesh.scatter(samples, actor.cost.balanced)
    with actor.free_routes():
        trainer = actor.logprobs(samples)
    replayed = actor.logprobs(samples) if options.replay else None
    routes = {name.removeprefix("moe/"): value for name, value in actor.route_stats().items()}
    rollout.close()
    return mesh, actor.shape.vocab_size, samples, trainer, replayed, routes


def in_fp32(folder: str, samples: list) -> list:
    """Log-probability of each response token [R] by transformers, parameters as in the folder, arithmetic in fp32."""
    import torch
    from transformers import AutoModelForCausalLM

    from megaflow.parallel import device

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).to(device.device()).eval()
    found = []
    with torch.no_grad():
        for s in samples:
            tokens = torch.cat([torch.tensor(s.prompt.tokens), s.response]).to(device.device())
            logits = model(tokens[None], logits_to_keep=s.num_response + 1).logits[0, :-1].float()  # [R, V]
            chosen = s.response.to(logits.device)[:, None]
            found.append(logits.log_softmax(-1).gather(-1, chosen)[:, 0].cpu())
    return found


def difference(a: list, b: list) -> dict[str, float]:
    """Over all tokens: mean and largest |a - b|, root mean square, mean of a - b."""
    import torch

    d = torch.cat([x.double() - y.double() for x, y in zip(a, b, strict=True)])
    return {"abs": float(d.abs().mean()), "rms": float(d.square().mean().sqrt()), "max": float(d.abs().max()), "bias": float(d.mean())}


if __name__ == "__main__":  # the engine's processes import this file
    main()
