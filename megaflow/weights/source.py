"""The trainer's side of a pull: this rank's window, its board, and the proof of what was read from it."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megaflow.parallel.board import Board
from megaflow.parallel.mesh import Mesh
from megaflow.parallel.pieces import ZEROS, Piece, Reading
from megaflow.parallel.regions import Digester, Regions
from megaflow.parallel.shared_memory import nothing
from megaflow.parallel.window import Window
from megaflow.shape import ModelShape
from megaflow.types import Layout
from megaflow.weights.pull import Place, Source, make_reading


def host_name() -> str:
    """Equal for ranks that see each other's processes: same boot of the same machine, same PID namespace."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot} {os.readlink('/proc/self/ns/pid')}"


def make_source(mesh: Mesh, vpp: int = 1) -> Source:
    """Collective. Where all ranks are."""
    mine = Place(mesh.rank, host_name(), mesh.tp.index, mesh.pp.index, mesh.dp.index, mesh.ep.index, mesh.etp.index)
    return Source(tuple(mesh.all_gather(mine)), mesh.tp.size, mesh.pp.size, vpp, mesh.ep.size, mesh.etp.size)


class PullSource:
    """What a rollout needs to load from this rank's live parameters (rollout.base.Source).

    parameters   global Megatron name -> this rank's live shard
    layout       of the engine worker beside this rank
    keep         readers may leave the window open between loads: the parameters stay where they are
    """

    transport = "pull"

    def __init__(self, shape: ModelShape, parameters: dict[str, Tensor], mesh: Mesh, source: Source, layout: Layout, dtype: torch.dtype,
                 timeout_s: float, keep: bool = True):  # fmt: skip
        """Collective. Needs `can_pull(shape, source)`."""
        self.timeout_s, self.keep, self.flip = timeout_s, keep, -1
        self.load_number = 0
        self.window = Window(parameters)
        here = [p.rank for p in source.places if p.host == source.places[mesh.rank].host]
        worker = {r: dataclasses.replace(layout, rank=r % layout.tp) for r in here}
        readings = {r: make_reading(shape, source, worker[r], r, dtype) for r in here}
        self.reading: Reading = readings[mesh.rank]
        self.board = Board.create(len(self.reading.pieces))
        notices = mesh.all_gather(self.board.notice)
        self.own_engine = mesh.rollout.ranks
        self.notices = [notices[r] for r in self.own_engine]  # of the engine's workers, by tp rank
        boards = {r: notices[r] for r in self.reading.sources}
        self.board.write("plan", json.dumps({"reading": self.reading.to_json(), "boards": boards, "timeout_s": timeout_s}))
        mine = [r for r in here if r == mesh.rank or mesh.rank in readings[r].sources]
        self.readers = [Reader(r, layout.tp, readings[r], notices[r], mesh.rank) for r in mine]
        for reader in self.readers:
            reader.check(self.window.parameters)
        self._regions = list(dict.fromkeys(region for reader in self.readers for region in reader.regions))
        numbers = {region: i for i, region in enumerate(self._regions)}
        for reader in self.readers:
            reader.number_regions(numbers)
        self.digester: Digester | None = None
        self.expected: Tensor | None = None

    def offer(self) -> None:
        """Open the window for the next load. The parameters must not change until `confirm` has returned."""
        self.load_number += 1
        before = self.window.addresses
        if self.window.refresh(may_have_moved=not self.keep):
            self.board.write("window", json.dumps(self.window.descriptor()))
        if self.window.addresses != before:
            self.digester = None
        self.board.offer(self.load_number, self.window.epoch)

    def message(self, proof: bool) -> dict[str, Any]:
        """What the engine's loader is told (JSON)."""
        return {"boards": self.notices, "load": self.load_number, "proof": proof, "flip": self.flip, "keep": self.keep}

    def start_proof(self) -> None:
        """Digests of what readers read from here, over the live parameters. Does not wait for the device."""
        if self.digester is None:
            base = {name: p.data_ptr() for name, p in self.window.parameters.items()}
            regions = Regions.of([(base[name] + offset, *rest) for name, offset, *rest in self._regions])
            self.digester = Digester(regions, next(iter(self.window.parameters.values())).device)
        self.expected = self.digester.launch()

    def confirm(self, check: Callable[[], None], proof: bool) -> str:
        """Wait until every reader of this rank's window has done the load. With `proof`: which tensor differs first; "" if none does.

        Raises ChannelError with a reader's error, EndLost when nothing comes; `check` raises when this rank's engine is not going to do it.
        """
        for reader in self.readers:
            is_ours = reader.rank in self.own_engine  # another one may still read when ours has done and answered
            reader.board.await_done(self.load_number, check if is_ours else nothing, self.timeout_s, reader.name)
        if not proof:
            return ""
        expected = self.expected.cpu()
        return next(filter(None, (reader.mismatch(expected) for reader in self.readers)), "")

    def engine_lost(self) -> None:
        """By the rank that owns an engine: its workers will not do the load, so nobody shall wait for them."""
        for notice in self.notices:
            Board.attach(notice).worker_lost(self.load_number)

    @property
    def nbytes(self) -> int:
        """Of the worker beside this rank."""
        return self.reading.nbytes

    @property
    def milliseconds(self) -> tuple[float, float]:
        """Of the last load: this rank's worker's copy, and its digests."""
        return self.board.milliseconds


class Reader:
    """An engine worker that reads from this rank (the worker beside it is also asked for its padding)."""

    def __init__(self, rank: int, engine_tp: int, reading: Reading, notice: dict[str, Any], source: int):
        self.rank, self.reading = rank, reading
        self.name = f"engine {rank // engine_tp}, tp rank {rank % engine_tp}"
        self.board = Board.attach(notice)
        self.pieces = [i for i, p in enumerate(reading.pieces) if p.source == source or (p.source == ZEROS and rank == source)]
        self.regions = [p.region for p in self._mine if p.source != ZEROS]

    @property
    def _mine(self) -> list[Piece]:
        return [self.reading.pieces[i] for i in self.pieces]

    def check(self, parameters: dict[str, Tensor]) -> None:
        """The plan and the model agree: pieces are bytes, and would go to the wrong place without a word."""
        for p in self._mine:
            if p.source != ZEROS:
                found, target = parameters[p.parameter], self.reading.targets[p.target]
                assert str(found.dtype) == f"torch.{target.dtype}", f"{p.parameter} is {found.dtype}, {target.name} {target.dtype}"
                end = p.offset + (p.rows - 1) * p.stride + p.row_bytes
                assert end <= found.nbytes, f"{p.parameter} {tuple(found.shape)} ends before byte {end} of the plan"

    def number_regions(self, numbers: dict[tuple, int]) -> None:
        """numbers: a region's place among the digests of this rank; the one after the last is padding's."""
        self._index = torch.tensor(self.pieces)
        self._expected = torch.tensor([numbers[p.region] if p.source != ZEROS else len(numbers) for p in self._mine])

    def mismatch(self, expected: Tensor) -> str:
        """expected: digests of this rank's regions. What differs first in the worker; "" if all is equal."""
        if not self.pieces:
            return ""
        padded = torch.cat([expected, expected.new_zeros(1)])  # zeros have the digest 0
        wrong = (self.board.digests[self._index] != padded[self._expected]).nonzero()[:, 0].tolist()
        if not wrong:
            return ""
        piece = self._mine[wrong[0]]
        where = "padding" if piece.source == ZEROS else f"from rank {piece.source}"
        return (
            f"{self.name}: {self.reading.targets[piece.target].name} in the engine differs from what was sent: "
            f"{where}, pipeline stage {piece.stage} ({len(wrong)} of {len(self.pieces)} pieces differ)"
        )
