"""How fast the links are that a sync and a sleeping actor use, each for a second at most; CUDA IPC opened for real; clocks of all ranks."""

from __future__ import annotations

import datetime
import functools
import os
import time
from collections.abc import Callable, Iterator

from megaflow.plan.machine import Finding, child

GB = 1e9
BYTES_ON_DEVICE, BYTES_ON_HOST = 1 << 28, 1 << 26
SECONDS = 0.4  # of each measurement
ROUNDS = 4  # of a broadcast
NCCL_S = 60.0  # then a broadcast counts as hanging
SLOW_PEER_GB_S, SLOW_HOST_GB_S, SLOW_RANKS_GB_S, SLOW_NCCL_GB_S = 20.0, 8.0, 0.05, 5.0
CLOCKS_WARN_S, CLOCKS_BAD_S = 1.0, 60.0


def measure(local_rank: int = 0) -> Iterator[Finding]:
    """Of this process's devices. Allocates 0.5 GB on each GPU that it looks at."""
    import torch

    if not torch.cuda.is_available():
        yield host_memory()
        return
    yield opens_ipc()
    here = torch.device("cuda", local_rank)
    yield _rate("device copy", here, here, 100.0, "another program is on it, or its clocks are held down: nvidia-smi -q -d PERFORMANCE")
    pinned = torch.empty(BYTES_ON_DEVICE, dtype=torch.uint8, pin_memory=True)
    target = torch.empty_like(pinned, device=here)
    for name, to, of in (("host to device", target, pinned), ("device to host", pinned, target)):
        copy = functools.partial(to.copy_, of, non_blocking=True)
        speed = repeated(copy, BYTES_ON_DEVICE, lambda: torch.cuda.synchronize(here))
        yield judged(f"pinned {name}", speed, SLOW_HOST_GB_S, "is the GPU in a slot of full width? nvidia-smi -q | grep -A3 'Link Width'")
    for other in range(torch.cuda.device_count()):
        if other != local_rank:
            yield _peer(here, torch.device("cuda", other))


def _peer(here, there) -> Finding:
    import torch

    name = f"GPU {there.index} to {here.index}"
    if not torch.cuda.can_device_access_peer(here.index, there.index):
        mend = "engines cannot read the other's memory: set sync.transport=buckets, or see nvidia-smi topo -m"
        return Finding("warn", name, "no peer access", mend)
    return _rate(name, there, here, SLOW_PEER_GB_S, "no NVLink between them? nvidia-smi topo -m")


def _rate(name: str, source, target, slow: float, mend: str) -> Finding:
    import torch

    a, b = (torch.empty(BYTES_ON_DEVICE, dtype=torch.uint8, device=d) for d in (source, target))
    speed = repeated(lambda: b.copy_(a, non_blocking=True), BYTES_ON_DEVICE, lambda: [torch.cuda.synchronize(d) for d in {source, target}])
    return judged(name, speed, slow, mend)


def host_memory() -> Finding:
    """One core's copy, which is what a sync on a CPU is."""
    import torch

    a = torch.zeros(BYTES_ON_HOST, dtype=torch.uint8)
    b = torch.zeros_like(a)
    return judged("host memory copy", repeated(lambda: b.copy_(a), BYTES_ON_HOST), 0.5, "the machine is busy or swaps")


def repeated(copy: Callable[[], object], nbytes: int, wait: Callable[[], object] = lambda: None) -> float:
    """1e9 bytes a second, after one round that does not count."""
    copy()
    wait()
    start, rounds = time.perf_counter(), 0
    while time.perf_counter() - start < SECONDS:
        for _ in range(4):
            copy()
        wait()
        rounds += 4
    return rounds * nbytes / GB / (time.perf_counter() - start)


def judged(name: str, speed: float, slow: float, mend: str) -> Finding:
    return Finding("ok" if speed >= slow else "warn", name, f"{speed:.3g} GB/s", f"below {slow:g} GB/s: {mend}")


OPEN_IPC = """
import sys, torch
from megaflow.parallel.cuda_ipc import close_segment, open_segment
torch.zeros(1, device="cuda")
base = open_segment(sys.argv[1])
close_segment(base)
print("opened")
"""


def opens_ipc() -> Finding:
    """A child process opens this one's device memory by the calls of a sync."""
    import torch

    from megaflow.parallel.cuda_ipc import export_segment, refuse_expandable_segments, segment_of
    from megaflow.types import PreflightError

    try:
        refuse_expandable_segments()
        tensor = torch.zeros(1 << 21, dtype=torch.uint8, device="cuda")
        done = child(OPEN_IPC, export_segment(segment_of(tensor.data_ptr())[0]))
    except (PreflightError, RuntimeError) as error:
        return Finding("bad", "CUDA IPC", str(error), "or use sync.transport=buckets")
    if "opened" in done.stdout:
        return Finding("ok", "CUDA IPC", "a child process opens device memory")
    last = (done.stderr.strip().splitlines() or ["no answer"])[-1]
    return Finding("bad", "CUDA IPC", f"a child process cannot open it: {last}", "docker run --ipc=host --pid=host, or one container")


def between_ranks() -> Iterator[Finding]:
    """Collective: clocks, and the speed of a broadcast from rank 0, through gloo and through NCCL. The findings are rank 0's."""
    import torch
    import torch.distributed as dist

    times: list[float] = [0.0] * dist.get_world_size()
    dist.barrier()
    dist.all_gather_object(times, time.time())
    yield clocks(times)
    speed = broadcasts(torch.zeros(BYTES_ON_HOST, dtype=torch.uint8), None, dist.barrier)
    mend = "GLOO_SOCKET_IFNAME names the fast network's interface; on CPU set OMP_NUM_THREADS=1"
    yield judged(f"gloo, {dist.get_world_size()} ranks", speed, SLOW_RANKS_GB_S, mend)
    yield from _through_nccl()


def _through_nccl() -> Iterator[Finding]:
    """Collective. The way of gradients, and of weights between hosts; where each rank has a GPU of its own."""
    import torch
    import torch.distributed as dist

    local = environment()["LOCAL_RANK"]
    has_own = [False] * dist.get_world_size()
    dist.all_gather_object(has_own, torch.cuda.is_available() and local < torch.cuda.device_count())
    if not all(has_own):
        return
    torch.cuda.set_device(local)
    name = f"NCCL, {len(has_own)} ranks"
    mend = "NCCL_DEBUG=INFO says which way it takes; NCCL_SOCKET_IFNAME and NCCL_IB_HCA name the network"
    try:
        group = dist.new_group(backend="nccl", timeout=datetime.timedelta(seconds=NCCL_S))
        data = torch.zeros(BYTES_ON_DEVICE, dtype=torch.uint8, device="cuda")
        yield judged(name, broadcasts(data, group, torch.cuda.synchronize), SLOW_NCCL_GB_S, mend)
    except RuntimeError as error:
        yield Finding("bad", name, (str(error).strip().splitlines() or [type(error).__name__])[0], mend)


def broadcasts(data, group, wait: Callable[[], object]) -> float:
    """Collective. 1e9 bytes a second from rank 0 to each other, after one round that does not count."""
    import torch.distributed as dist

    dist.broadcast(data, 0, group=group)
    wait()
    start = time.perf_counter()
    for _ in range(ROUNDS):
        dist.broadcast(data, 0, group=group)
    wait()
    return ROUNDS * data.nbytes / GB / (time.perf_counter() - start)


def clocks(times: list[float]) -> Finding:
    """times: what each rank's clock said at about the same moment."""
    apart = max(times) - min(times)
    state = "ok" if apart < CLOCKS_WARN_S else "warn" if apart < CLOCKS_BAD_S else "bad"
    slow, fast = times.index(min(times)), times.index(max(times))
    where = f" (rank {fast} is ahead of rank {slow})" if state != "ok" else ""
    mend = "start chrony or ntpd on all hosts; logs and traces cannot be put side by side otherwise"
    return Finding(state, "clocks", f"within {apart:.3f} s over {len(times)} ranks{where}", mend)


def environment() -> dict[str, int]:
    """Rank, local rank and number of ranks, as the launcher says."""
    return {name: int(os.environ.get(name, "0" if name != "WORLD_SIZE" else "1")) for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE")}
