"""Seconds and GB/s of a sync, with and without the proof, against SGLang's own flattened-bucket path in the same run.

    torchrun --nproc-per-node 1 tools/bench/sync.py models/bench-1.5b
    torchrun --nproc-per-node 2 tools/bench/sync.py models/bench-3b parallel.pp=2 rollout.tp=2

Medians of 10 after 2 that warm up. `ours` is from the trained weights to the engine's answer that all is copied (and proven).
"""

from __future__ import annotations

import dataclasses
import statistics
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent.parent))

REPEATS, WARM_UP = 10, 2


def main() -> None:
    from megaflow.config.loading import load
    from megaflow.data import load_tokenizer
    from megaflow.parallel import device
    from megaflow.parallel.mesh import Mesh
    from megaflow.rollout import BACKENDS
    from megaflow.trainer.build import build_actor, stop_token_ids
    from megaflow.trainer.sync import Sync

    folder, *overrides = sys.argv[1:]
    cfg = load(None, [f"model.path={folder}", "rollout.cuda_graph=false", "rollout.mem_fraction=0.3", *overrides]).config
    mesh = Mesh.create(cfg.parallel, cfg.rollout.tp)
    actor = build_actor(cfg, mesh)
    tokenizer = load_tokenizer(folder)
    rollout = BACKENDS.get("sglang")(cfg, mesh, tokenizer, stop_token_ids(folder, tokenizer))
    sync = Sync(cfg, mesh, actor, rollout)
    version = 0

    def ours(proof: bool) -> float:
        nonlocal version
        version += 1
        sync.proof = proof
        actor.wake()
        mesh.barrier()
        device.synchronize()
        start = time.perf_counter()
        rollout.load_weights(sync.resharder.stream, sync.entries, version, proof)
        return time.perf_counter() - start

    def median(action, *args) -> float:
        return statistics.median([action(*args) for _ in range(WARM_UP + REPEATS)][WARM_UP:])

    gb = sync.plan.nbytes / 1e9
    figures = {f"{sync.plan.mode}, proof {'on' if p else 'off'}": median(ours, p) for p in (False, True)}
    if mesh.world_size == 1:
        figures["SGLang flattened_bucket, 512 MB"] = median(flattened, actor, cfg, mesh, rollout)
    if mesh.rank == 0:
        print(f"{folder}: {gb:.2f} GB to each engine worker, {len(sync.plan.buckets)} buckets, ranks {mesh.world_size}")
        for name, seconds in figures.items():
            print(f"  {name:36} {seconds * 1e3:8.2f} ms  {gb / seconds:7.1f} GB/s", flush=True)
    rollout.close()
    mesh.close()


def flattened(actor, cfg, mesh, rollout) -> float:
    """The way that SGLang's documentation gives: named Hugging Face tensors in flat buckets, through its load_weights."""
    from sglang.srt.managers.io_struct import UpdateWeightsFromTensorReqInput
    from sglang.srt.utils import MultiprocessingSerializer
    from sglang.srt.weight_sync.tensor_bucket import FlattenedTensorBucket

    from megaflow.parallel import device
    from megaflow.trainer.export import full_tensors

    named = [(n, t.clone()) for n, t in full_tensors(actor, dataclasses.replace(cfg), mesh)]
    device.synchronize()
    start = time.perf_counter()
    buckets, size = [[]], 0
    for name, tensor in named:
        if size > 512 << 20:
            buckets.append([])
            size = 0
        buckets[-1].append((name, tensor))
        size += tensor.nbytes
    for i, bucket in enumerate(buckets):
        flat = FlattenedTensorBucket(named_tensors=bucket)
        payload = MultiprocessingSerializer.serialize({"flattened_tensor": flat.get_flattened_tensor(), "metadata": flat.get_metadata()})
        is_last = i == len(buckets) - 1
        request = UpdateWeightsFromTensorReqInput(serialized_named_tensors=[payload], load_format="flattened_bucket", flush_cache=is_last)
        rollout.engine.wait(rollout.engine.submit(rollout.engine._load(request)), 60.0, "flattened bucket")
    return time.perf_counter() - start


if __name__ == "__main__":
    main()
