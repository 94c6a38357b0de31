"""The engine's side of a pull: read the pieces of this worker's parameters from the trainer ranks' windows. Runs in SGLang's schedulers."""

from __future__ import annotations

import itertools
import json
import time
from typing import Any

import torch
from torch import Tensor

from megaflow.parallel.board import Board
from megaflow.parallel.pieces import ZEROS, Piece, Reading, Target
from megaflow.parallel.regions import Copier, Digester, Regions
from megaflow.parallel.window import OpenWindow


class Puller:
    """One worker. Mappings, plan and tables of work are made at the first load and kept as long as no address changes.

    notice   of the board of the rank beside this worker; its sheet `plan` holds a Reading and the notices of the ranks that it reads from
    """

    def __init__(self, notice: dict[str, Any]):
        self.board = Board.attach(notice)
        plan = json.loads(self.board.read("plan"))
        self.reading = Reading.from_json(plan["reading"])
        self.sources = {int(rank): Board.attach(n) for rank, n in plan["boards"].items()}
        self.timeout_s: float = plan["timeout_s"]
        self.epochs: dict[int, int] = {}
        self.windows: dict[int, OpenWindow] = {}
        self._parameters: dict[str, Tensor] | None = None
        self._targets: list[Tensor] = []
        self.addresses: list[int] = []  # of the targets
        self.where: Any = None  # all addresses that the tables of work are made of
        self.copier: Copier | None = None
        self.digester: Digester | None = None

    @torch.no_grad()
    def load(self, parameters: dict[str, Tensor], load: int, proof: bool, flip: int, keep: bool) -> None:
        """Fill `parameters` with load number `load`. keep: windows stay open, for the ranks' weights will not move until the next load.

        flip: number of the piece whose first value is changed after the copy, for tests; -1: none.
        """
        try:
            self._prepare(parameters, load)
            watch = StopWatch(self._targets[0].device)
            self._copy(flip)
            watch.mark()
            digests = self.digester.launch() if proof else None
            watch.mark()
            copy_ms, proof_ms = watch.milliseconds()
            if not keep:
                self._close_windows()
            self.board.done(load, digests, copy_ms, proof_ms)
        except Exception as e:  # the ranks wait at the board, not for SGLang's answer
            self.board.fail(load, f"{type(e).__name__}: {e}")
            raise

    def _prepare(self, parameters: dict[str, Tensor], load: int) -> None:
        for rank, board in self.sources.items():
            epoch = board.await_offer(load, self.timeout_s)
            if rank not in self.windows or self.epochs[rank] != epoch:
                self._open_window(rank, board, epoch)
        if parameters is not self._parameters:
            self._targets, self._parameters = [_checked(parameters, t) for t in self.reading.targets], parameters
        targets = [t.data_ptr() for t in self._targets]
        where = (targets, {rank: window.layout for rank, window in self.windows.items()})
        if where != self.where:  # on CUDA a sleep keeps the engine's addresses, on CPU it does not
            self.where, self.addresses = where, targets
            self._make_work()

    def _open_window(self, rank: int, board: Board, epoch: int) -> None:
        if rank in self.windows:
            self.windows.pop(rank).close()
        self.windows[rank], self.epochs[rank] = OpenWindow(json.loads(board.read("window"))), epoch

    def _close_windows(self) -> None:
        for window in self.windows.values():
            window.close()
        self.windows = {}

    def _make_work(self) -> None:
        device = self._targets[0].device
        pieces = self.reading.pieces
        moved = [p for p in pieces if p.source != ZEROS]
        sources = Regions.of([(self.windows[p.source].address(p.parameter) + p.offset, p.stride, p.rows, p.row_bytes) for p in moved])
        is_remote = torch.tensor([p.source != self.reading.reader for p in moved], dtype=torch.bool).numpy()
        self.copier = Copier(sources, self._regions(moved), is_remote, device)
        self.digester = Digester(self._regions(pieces), device)
        self._padding = [_view(self._targets[p.target], p) for p in pieces if p.source == ZEROS]

    def _regions(self, pieces: list[Piece]) -> Regions:
        return Regions.of([(self.addresses[p.target] + p.target_offset, p.target_stride, p.rows, p.row_bytes) for p in pieces])

    def _copy(self, flip: int) -> None:
        for padding in self._padding:
            padding.zero_()
        self.copier.launch()
        if flip >= 0:  # fault injection: tests show that the proof catches and names it
            piece = self.reading.pieces[flip]
            target = self._targets[piece.target]
            target.view(-1)[piece.target_offset // target.itemsize] += 1


class StopWatch:
    """Milliseconds between marks in the work of a device; the first mark is set when it is made."""

    def __init__(self, device: torch.device):
        self.device = device
        self.marks: list[Any] = []
        self.mark()

    def mark(self) -> None:
        if self.device.type == "cuda":
            self.marks.append(torch.cuda.Event(enable_timing=True))
            self.marks[-1].record()
        else:
            self.marks.append(time.perf_counter())

    def milliseconds(self) -> list[float]:
        """Between neighbouring marks. Waits until the work before the last one is done."""
        pairs = list(itertools.pairwise(self.marks))
        if self.device.type == "cuda":
            self.marks[-1].synchronize()
            return [a.elapsed_time(b) for a, b in pairs]
        return [(b - a) * 1e3 for a, b in pairs]


def _checked(parameters: dict[str, Tensor], target: Target) -> Tensor:
    name, shape, dtype = target
    if name not in parameters:
        raise KeyError(f"the engine has no parameter {name}; it has e.g. {', '.join(list(parameters)[:3])}")
    found = parameters[name]
    if tuple(found.shape) != shape or str(found.dtype) != f"torch.{dtype}":
        raise ValueError(f"{name}: the engine stores {list(found.shape)} {found.dtype}, the trainer sends {list(shape)} torch.{dtype}")
    if not found.is_contiguous():
        raise ValueError(f"{name}: the engine stores it with strides {list(found.stride())}, which a sync cannot write to")
    return found


def _view(target: Tensor, piece: Piece) -> Tensor:
    flat = target.view(-1).view(torch.uint8)
    return flat.as_strided((piece.rows, piece.row_bytes), (piece.target_stride, 1), flat.storage_offset() + piece.target_offset)
