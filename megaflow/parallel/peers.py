"""An error on one rank ends all ranks with that error, within seconds.

A rank that fails may leave the others waiting in a collective, where no Python handler runs. So each rank has a thread that looks
into the rendezvous store once a second: an error that a peer left there, or a peer on this host that is gone, ends this process too.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator

import torch.distributed as dist

from megaflow.background import background
from megaflow.types import PreflightError

PERIOD_S = 0.5
CAUSE_S = 2.0  # a broken connection is noticed before the news of what broke it


class PeerWatch:
    """`report` tells the other ranks of this rank's error; `on_peer_error(message, exit_code)` runs before this process follows one."""

    def __init__(self, store: dist.Store, rank: int, world_size: int):
        self.store, self.rank, self.world_size = store, rank, world_size
        self.on_peer_error: Callable[[str, int], None] = lambda message, code: None
        self._done = threading.Event()
        self._local_peers: dict[int, int] = {}  # rank -> pid, on this host

    @classmethod
    def start(cls) -> PeerWatch:
        """Collective in effect: every rank registers itself; nobody waits."""
        rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        if world == 1:
            return cls(dist.HashStore(), rank, world)
        attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        hosted_by_launcher = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
        port = int(os.environ["MASTER_PORT"]) + (0 if hosted_by_launcher else 1)
        is_server = rank == 0 and not hosted_by_launcher
        store = dist.TCPStore(os.environ["MASTER_ADDR"], port, None, is_server, wait_for_workers=False)
        watch = cls(dist.PrefixStore(f"megaflow/{attempt}", store), rank, world)
        watch.store.set(f"rank{rank}", json.dumps([socket.gethostname(), os.getpid()]))
        background(watch._watch, "peer-watch", watch._done.set)
        return watch

    def report(self, message: str, exit_code: int) -> None:
        """Tell every rank that this one fails. The first report stands."""
        self._done.set()
        if self.world_size > 1:
            self.store.compare_set("error", "", json.dumps([self.rank, message, exit_code]))

    def cause(self, error: BaseException) -> tuple[str, int] | None:
        """What a peer did (message, exit code) that made a collective fail here with `error`; None when the error is this rank's own."""
        text = str(error)
        is_of_collective = isinstance(error, dist.DistError) or (isinstance(error, RuntimeError) and ("gloo" in text or "NCCL" in text))
        if self.world_size == 1 or not is_of_collective:
            return None
        deadline = time.monotonic() + CAUSE_S
        with contextlib.suppress(dist.DistError):  # the store went as well, and with it the cause
            while (found := self._peer_error()) is None and time.monotonic() < deadline:
                time.sleep(0.05)
            return found
        return None

    def leave(self) -> None:
        """This rank has finished well; its end is no error."""
        if self.world_size > 1 and not self._done.is_set():
            self.store.set(f"left{self.rank}", "1")
        self._done.set()

    def _watch(self) -> None:
        while not self._done.wait(PERIOD_S):
            try:
                found = self._peer_error()
            except dist.DistError:  # the store went away with the launcher or with rank 0
                found = ("the rendezvous store is gone: the launcher or rank 0 has ended", 1) if not self._done.wait(5.0) else None
            if found and not self._done.is_set():
                self.follow(*found)

    def _peer_error(self) -> tuple[str, int] | None:
        if self.store.check(["error"]):
            rank, message, code = json.loads(self.store.get("error"))
            return message if message.startswith("rank ") else f"rank {rank}: {message}", code
        for rank, pid in self._peers_on_this_host().items():
            if _is_gone(pid) and not self.store.check([f"left{rank}"]) and not self.store.check(["error"]):
                return f"rank {rank} (pid {pid}) is gone without a word: killed, or out of memory", 1
        return None

    def _peers_on_this_host(self) -> dict[int, int]:
        for rank in range(self.world_size):
            if rank != self.rank and rank not in self._local_peers and self.store.check([f"rank{rank}"]):
                host, pid = json.loads(self.store.get(f"rank{rank}"))
                self._local_peers[rank] = pid if host == socket.gethostname() else 0
        return {rank: pid for rank, pid in self._local_peers.items() if pid}

    def follow(self, message: str, exit_code: int) -> None:
        """End this process and its children now, from any thread, as a peer's report says."""
        print(f"[rank {self.rank}] ending: {message}", file=sys.stderr, flush=True)
        self.end(message, exit_code)

    def end(self, message: str, exit_code: int) -> None:
        """End this process and its children now, from any thread."""
        try:
            self.on_peer_error(message, exit_code)
        finally:
            # the main thread may sit in a collective for ever: no orderly exit is possible
            _kill_children()
            os._exit(exit_code)


@contextlib.contextmanager
def meeting() -> Iterator[None]:
    """Around the calls in which ranks find each other. Raises PreflightError for an address or a port that does not serve."""
    try:
        yield
    except dist.DistNetworkError as error:
        address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        if "EADDRINUSE" in str(error):
            ways = "torchrun --master-port N, or MASTER_PORT=N in the environment of srun"
            raise PreflightError(f"port {port} or {port + 1} of {address} is in use by another program; take another: {ways}") from error
        said = (str(error).strip().splitlines() or ["no answer"])[0]
        asked = f"is {address} (MASTER_ADDR) its host, and does no firewall close ports {port} and {port + 1}?"
        raise PreflightError(f"rank {os.environ['RANK']} does not find rank 0: {said}; {asked}") from error


def _is_gone(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat") as f:
            return f.read().rsplit(")", 1)[1].split()[0] == "Z"
    except FileNotFoundError:
        return True


def _kill_children() -> None:
    import psutil

    for child in psutil.Process().children(recursive=True):
        try:
            child.send_signal(signal.SIGKILL)
        except psutil.NoSuchProcess:
            continue
