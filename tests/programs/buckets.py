"""Weights of made-up models, cut for several layouts of four ranks, through the buckets of a sync: what each engine worker gets, bit for
bit, against slices cut by hand. Without Megatron and without an engine."""

from __future__ import annotations

import dataclasses
import itertools
from types import SimpleNamespace

import torch
import torch.distributed as dist

from megaflow.config.schema import ParallelConfig
from megaflow.parallel.mesh import Axis
from megaflow.types import Layout
from megaflow.weights.plan import experts_of, make_plan
from megaflow.weights.reshard import Resharder
from megaflow.weights.table import table
from tests.ranks import report
from tests.unit.test_weights_pull import engine_tensors_by_hand, latent_shape, make_shape, random_tensors

WORLD, BUCKET_BYTES = 4, 2048
DENSE, EXPERTS = make_shape("qwen2", kv_heads=4, tied=True), make_shape("qwen3_moe", kv_heads=4)
P, ENGINE = ParallelConfig, lambda tp, ep=1: Layout(tp, fused=True, ep=ep)
CASES = [
    ("vpp, direct", DENSE, P(tp=2, pp=2, vpp=2), ENGINE(2), "direct"),
    ("vpp, joined", DENSE, P(tp=2, pp=2, vpp=2), ENGINE(4), "gather"),
    ("one engine rank", EXPERTS, P(pp=2, ep=2), ENGINE(1), "gather"),
    ("own experts", EXPERTS, P(ep=4), ENGINE(4, 4), "direct but dense"),
    ("own experts, two replicas", EXPERTS, P(tp=2, ep=2, sp=True), ENGINE(2, 2), "direct"),
    ("own experts, stages of chunks", EXPERTS, P(tp=2, pp=2, vpp=2, ep=2, sp=True), ENGINE(2, 2), "direct"),
    ("experts cut alike", EXPERTS, P(tp=2, pp=2, etp=2, sp=True), ENGINE(2), "direct"),
    ("cut experts to whole ones", EXPERTS, P(tp=2, ep=2, etp=2, sp=True), ENGINE(2, 2), "gather"),
    ("whole experts to others' numbers", EXPERTS, P(ep=2), ENGINE(4, 4), "gather"),
    ("whole experts to cut ones", EXPERTS, P(ep=4), ENGINE(4), "gather"),
    ("plain names", EXPERTS, P(pp=2, vpp=2, ep=2), Layout(), "gather"),
    ("latent attention", latent_shape(8), P(tp=2, pp=2, ep=2, sp=True), ENGINE(2, 2), "gather"),
    ("latent attention, one rank", latent_shape(None), P(ep=2), ENGINE(1), "gather"),
]


def main() -> None:
    dist.init_process_group("gloo")
    axes = Axes()
    found = {}
    for name, shape, parallel, layout, mode in CASES:
        mesh, layout = axes.mesh(parallel, layout.tp), dataclasses.replace(layout, rank=dist.get_rank() % layout.tp)
        hf = random_tensors(shape, torch.bfloat16)
        plans = [make_plan(shape, parallel, dataclasses.replace(layout, rank=r), torch.bfloat16, BUCKET_BYTES) for r in range(layout.tp)]
        source = Resharder(plans, shape, parameters_of(shape, hf, parallel, mesh), mesh)
        expected = expected_of(shape, hf, layout)
        got = received(source, expected, layout.rank)
        wrong = [n for n in expected if n not in got or not torch.equal(got[n], expected[n])]
        ways = {b.way.axis: b.way.direct for b in source.plan.buckets}
        found[name] = {"wrong": wrong[:3], "mode": source.plan.mode, "expected": mode, "ways": ways, "buckets": len(source.plan.buckets)}
    report(**found)
    dist.destroy_process_group()


class Axes:
    """Groups as Megatron numbers ranks: tp, then dp, then pp; of experts etp, then ep, then dp, then pp. Made once, by every rank."""

    def __init__(self):
        self.groups = {}

    def mesh(self, p: ParallelConfig, rollout_tp: int) -> SimpleNamespace:
        stage = WORLD // p.pp
        of = {
            "tp": (1, p.tp), "pp": (stage, p.pp), "etp": (1, p.etp), "ep": (p.etp, p.ep), "rollout": (1, rollout_tp),
        }  # fmt: skip
        return SimpleNamespace(**{axis: self._axis(step, size) for axis, (step, size) in of.items()})

    def _axis(self, step: int, size: int) -> Axis:
        """Ranks at distance `step`, `size` of them."""
        mine = None
        starts = [r for r in range(WORLD) if r // step % size == 0]
        for start in starts:
            ranks = tuple(start + i * step for i in range(size))
            if ranks not in self.groups:
                self.groups[ranks] = dist.new_group(list(ranks))
            if dist.get_rank() in ranks:
                mine = Axis(size, ranks.index(dist.get_rank()), self.groups[ranks], ranks)
        return mine


def parameters_of(shape, hf, p: ParallelConfig, mesh) -> dict[str, torch.Tensor]:
    held = {}
    for row in table(shape):
        if row.stage(p.pp, shape.num_layers, p.vpp) != mesh.pp.index or (row.expert >= 0 and row.expert * p.ep // 4 != mesh.ep.index):
            continue
        axis = mesh.etp if row.expert >= 0 else mesh.tp
        held[row.megatron] = row.kind.split([hf[n] for n in row.hf], axis.size, axis.index, shape).contiguous()
    return held


def expected_of(shape, hf, layout: Layout) -> dict[str, torch.Tensor]:
    if not layout.fused:
        return hf
    expected = engine_tensors_by_hand(shape, hf, layout.tp, layout.rank)
    if layout.ep > 1:
        mine, whole = experts_of(shape, layout), engine_tensors_by_hand(shape, hf, 1, 0)
        expected |= {n: t[mine.start : mine.stop] for n, t in whole.items() if ".experts." in n}
    return expected


def received(source: Resharder, expected, rank: int) -> dict[str, torch.Tensor]:
    """As the engine's loader puts it together; every element is written once."""
    entries = source.entries[rank % len(source.entries)]
    got = {n: torch.full_like(t, float("nan")) for n, t in expected.items()}
    count = dict.fromkeys(got, 0)
    stream = source.stream(lambda n: torch.empty(n + 64, dtype=torch.uint8))
    for filled, bucket in itertools.zip_longest(stream, entries):
        for name, whole, first, offset, nbytes, dtype in bucket:
            piece = filled.data[offset : offset + nbytes].view(getattr(torch, dtype))
            assert tuple(got[name].shape) == tuple(whole) and got[name].dtype == piece.dtype, (name, whole, dtype)
            got[name].view(-1)[first : first + len(piece)] = piece
            count[name] += len(piece)
        assert [n for n, _ in filled.tensors()] == [e[0] for e in bucket]
    assert all(count[n] == t.numel() for n, t in got.items()), {n: c for n, c in count.items() if c != got[n].numel()}
    return got


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
