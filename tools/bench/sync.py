"""A sync, with and without the proof, against SGLang's own flattened-bucket path and against bare copies of as many bytes, in one run.

    torchrun --nproc-per-node 1 tools/bench/sync.py models/bench-1.5b
    torchrun --nproc-per-node 2 tools/bench/sync.py models/bench-3b parallel.pp=2 rollout.tp=2 --json sync.json

After the model's folder come config keys, as for training. Medians over --repeats after two that warm up. A sync is measured from the
trained weights to the engine that holds them, proven, on every rank; the slowest rank counts. Bytes are those of one engine worker.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent.parent))

WARM_UP = 2
BUCKET = 512 << 20  # of SGLang's path
# A sync needs neither graphs nor much cache.
SETTINGS = ("rollout.cuda_graph=false", "rollout.mem_fraction=0.3", "rollout.max_tokens=16384")


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("folder", help="Hugging Face folder of the model (tools/bench/make_model.py makes random ones)")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="config keys: parallel.tp=2 parallel.pp=2 rollout.tp=2 ...")
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument("--json", type=Path, help="also write the rows to this file")
    return parser.parse_args()


class Bench:
    """The actor, its engines and two syncs, one for each transport."""

    def __init__(self, folder: str, overrides: list[str]):
        from megaflow.config.loading import load
        from megaflow.data import load_tokenizer
        from megaflow.parallel.mesh import Mesh
        from megaflow.rollout import BACKENDS
        from megaflow.trainer.build import build_actor, stop_token_ids
        from megaflow.trainer.sync import Sync

        self.cfg = cfg = load(None, [f"model.path={folder}", *SETTINGS, *overrides]).config
        self.mesh = Mesh.create(cfg.parallel, cfg.rollout.tp)
        tokenizer = load_tokenizer(folder)
        self.rollout = BACKENDS.get("sglang")(cfg, self.mesh, tokenizer, stop_token_ids(folder, tokenizer))  # starts beside the actor
        self.actor = build_actor(cfg, self.mesh)
        each = {t: dataclasses.replace(cfg, sync=dataclasses.replace(cfg.sync, transport=t)) for t in ("pull", "buckets")}
        self.syncs = {t: Sync(c, self.mesh, self.actor, self.rollout) for t, c in each.items()}
        self.nbytes = self.syncs["pull"].source.nbytes
        self.version = 0

    def sync(self, transport: str, proof: bool) -> float:
        self.version += 1
        source = self.syncs[transport].source
        self.rollout.await_start()
        self.rollout.loader.settle()
        return self.timed(lambda: self.rollout.load_weights(source, self.version, proof))

    def timed(self, action: Callable[[], object]) -> float:
        """Seconds of the slowest rank; all begin together."""
        from megaflow.parallel import device

        device.synchronize()
        self.mesh.barrier()
        start = time.perf_counter()
        action()
        device.synchronize()
        return max(self.mesh.all_gather(time.perf_counter() - start))

    def flattened(self) -> float:
        """The way that SGLang's documentation gives: named Hugging Face tensors in flat buckets, through its load_weights. That they lie
        whole on every rank, ready to be sent, is not in the time: a trainer would have to gather them first."""
        from megaflow.trainer.export import full_tensors

        buckets: list[list] = [[]]
        for name, tensor in full_tensors(self.actor, self.cfg, self.mesh):
            if sum(t.nbytes for _, t in buckets[-1]) > BUCKET:
                buckets.append([])
            buckets[-1].append((name, tensor.clone()))
        return self.timed(lambda: self._send(buckets))

    def _send(self, buckets: list[list]) -> None:
        import torch.distributed as dist
        from sglang.srt.utils import MultiprocessingSerializer
        from sglang.srt.weight_sync.tensor_bucket import FlattenedTensorBucket

        for i, bucket in enumerate(buckets):
            flat = FlattenedTensorBucket(named_tensors=bucket)
            data = {"flattened_tensor": flat.get_flattened_tensor(), "metadata": flat.get_metadata()}
            payload = MultiprocessingSerializer.serialize(data)
            payloads = [payload]
            if self.mesh.rollout.size > 1:
                payloads = [None] * self.mesh.rollout.size
                dist.all_gather_object(payloads, payload, group=self.mesh.rollout.group)
            engine = self.rollout.engine
            if engine is not None:
                engine.wait(engine.update_weights(payloads, "flattened_bucket", i == len(buckets) - 1), 120.0, "flattened bucket")
            if self.mesh.rollout.size > 1:
                dist.barrier(group=self.mesh.rollout.group)  # the flat tensor must live until every worker has copied it

    def copy(self) -> float:
        """One copy of as many bytes on each rank's own device."""
        source, target = self._buffers()
        return self.timed(lambda: target.copy_(source))

    def broadcast(self) -> float:
        """One broadcast of as many bytes from rank 0 to all ranks."""
        import torch.distributed as dist

        buffer, _ = self._buffers()
        return self.timed(lambda: dist.broadcast(buffer, 0))

    def _buffers(self):
        import torch

        from megaflow.parallel import device

        if not hasattr(self, "_made"):
            self._made = [torch.zeros(self.nbytes, dtype=torch.uint8, device=device.device()) for _ in range(2)]
        return self._made


def measure(bench: Bench, repeats: int) -> list[dict]:
    from megaflow.parallel import device

    rows: list[dict] = []

    def row(name: str, action: Callable[[], float]) -> dict:
        seconds = statistics.median([action() for _ in range(WARM_UP + repeats)][WARM_UP:])
        rows.append({"what": name, "ms": seconds * 1e3, "gb_per_s": bench.nbytes / 1e9 / seconds})
        return rows[-1]

    for proof in (False, True):
        found = row(f"pull, proof {'on' if proof else 'off'}", lambda p=proof: bench.sync("pull", p))
        found["copy_ms"], found["proof_ms"] = bench.syncs["pull"].source.milliseconds
    for proof in (False, True):
        row(f"buckets, proof {'on' if proof else 'off'}", lambda p=proof: bench.sync("buckets", p))
    if device.on_cuda():  # on CPU it hands over file descriptors, which only the engine's own parent process could
        row("SGLang, flattened buckets", bench.flattened)
    row("device copy", bench.copy)
    if bench.mesh.world_size > 1:
        row("broadcast", bench.broadcast)
    for each in rows:
        each.update({f"times {other['what']}": each["ms"] / other["ms"] for other in rows[4:]})
    return rows


def show(bench: Bench, folder: str, rows: list[dict]) -> None:
    p, reading = bench.cfg.parallel, bench.syncs["pull"].source.reading
    print(
        f"{folder}: {bench.nbytes / 1e9:.2f} GB to each engine worker, {reading.link_bytes / 1e9:.2f} of them from other ranks; "
        f"actor tp={p.tp} pp={p.pp}, engine tp={bench.cfg.rollout.tp}, {bench.mesh.world_size} ranks; {len(reading.pieces)} pieces"
    )
    references = [r["what"] for r in rows[4:]]
    print(f"  {'':28} {'ms':>9} {'GB/s':>8}" + "".join(f"  / {name}" for name in references) + "   engine's copy + digests, ms")
    for r in rows:
        ratios = "".join(f"  {r[f'times {name}']:>{len(name) + 2}.3f}" for name in references)
        parts = f"   {r['copy_ms']:.2f} + {r['proof_ms']:.2f}" if "copy_ms" in r else ""
        print(f"  {r['what']:28} {r['ms']:9.2f} {r['gb_per_s']:8.1f}{ratios}{parts}", flush=True)


def main() -> None:
    args = arguments()
    bench = Bench(args.folder, args.overrides)
    rows = measure(bench, args.repeats)
    if bench.mesh.rank == 0:
        show(bench, args.folder, rows)
        if args.json:
            keys = {"tp": bench.cfg.parallel.tp, "pp": bench.cfg.parallel.pp, "rollout_tp": bench.cfg.rollout.tp}
            facts = {"folder": args.folder, "ranks": bench.mesh.world_size, **keys, "bytes": bench.nbytes}
            args.json.write_text(json.dumps({**facts, "link_bytes": bench.syncs["pull"].source.reading.link_bytes, "rows": rows}, indent=2))
    bench.rollout.close()
    bench.mesh.close()


if __name__ == "__main__":
    main()
