"""The ranks and their axes. Order of Megatron-core: tp varies fastest, then cp, ep, dp, and pp slowest."""

from __future__ import annotations

import contextlib
import datetime
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from megaflow.config.schema import ParallelConfig
from megaflow.parallel import comm, device, megatron_shim
from megaflow.parallel.peers import PeerWatch, meeting
from megaflow.types import ConfigError


@dataclass(frozen=True)
class Axis:
    """One axis as this rank sees it: `ranks[index]` is this rank."""

    size: int
    index: int
    group: dist.ProcessGroup
    ranks: tuple[int, ...]

    @property
    def is_first(self) -> bool:
        return self.index == 0

    @property
    def is_last(self) -> bool:
        return self.index == self.size - 1


@dataclass(frozen=True)
class Axes:
    """The actor's axes. tp x cp x dp x pp are all ranks; so are etp x ep x edp x pp, the same ranks divided anew for experts.

    dp   the ranks that hold different samples, and the same parameters but for experts
    ep   the ranks that hold different experts; it cuts through tp, cp and dp
    edp  the ranks that hold the same experts
    """

    tp: Axis
    cp: Axis
    dp: Axis
    pp: Axis
    etp: Axis
    ep: Axis
    edp: Axis

    @classmethod
    def start(cls, parallel: ParallelConfig, timeout_s: float) -> Axes:
        """Collective. Make Megatron's process groups."""
        from megatron.core import parallel_state as mpu

        mpu.initialize_model_parallel(
            parallel.tp,
            parallel.pp,
            parallel.vpp if parallel.vpp > 1 else None,
            context_parallel_size=parallel.cp,
            expert_model_parallel_size=parallel.ep,
            expert_tensor_parallel_size=parallel.etp,
            distributed_timeout_minutes=max(1, int(timeout_s / 60)),
        )
        return cls(
            tp=_axis(mpu.get_tensor_model_parallel_group()),
            cp=_axis(mpu.get_context_parallel_group()),
            dp=_axis(mpu.get_data_parallel_group()),
            pp=_axis(mpu.get_pipeline_model_parallel_group()),
            etp=_axis(mpu.get_expert_tensor_parallel_group()),
            ep=_axis(mpu.get_expert_model_parallel_group()),
            edp=_axis(mpu.get_expert_data_parallel_group()),
        )

    def connected(self) -> list[Axis]:
        """Those over which tensors travel: a communicator takes device memory, also one of a single rank, or of experts that nobody has."""
        experts = (self.etp, self.ep, self.edp) if self.ep.size * self.etp.size > 1 else ()
        return [axis for axis in (self.tp, self.cp, self.dp, self.pp, *experts) if axis.size > 1]


class Mesh:
    """All ranks, the actor's axes, and the rollout groups: `rollout_tp` consecutive ranks that own one engine."""

    def __init__(self, axes: Axes, rollout: Axis, host_group: dist.ProcessGroup, watch: PeerWatch, timeout_s: float):
        self.axes = axes
        self.tp, self.cp, self.dp, self.pp = axes.tp, axes.cp, axes.dp, axes.pp
        self.etp, self.ep, self.edp = axes.etp, axes.ep, axes.edp
        self.rollout = rollout
        self.host_group = host_group  # gloo over all ranks: data and decisions that live in host memory
        self.watch = watch
        self.timeout_s = timeout_s
        self.rank, self.world_size = dist.get_rank(), dist.get_world_size()
        self.num_engines = self.world_size // rollout.size
        self.engine_index = self.rank // rollout.size
        replicas = self.all_gather(self.dp.index)
        self.replicas = [[r for r, d in enumerate(replicas) if d == i] for i in range(self.dp.size)]  # dp index -> its tp x cp x pp ranks

    @classmethod
    def create(cls, parallel: ParallelConfig, rollout_tp: int = 1, timeout_s: float = 1800.0) -> Mesh:
        """Collective. Start the process groups. Works under torchrun, srun with its variables set, or alone as one rank.

        Raises ConfigError when the sizes do not multiply to the number of ranks.
        """
        single_rank_env()
        check_sizes(parallel, rollout_tp, int(os.environ["WORLD_SIZE"]))
        megatron_shim.install()
        device.select_device()
        timeout = datetime.timedelta(seconds=timeout_s)
        with meeting():
            watch = PeerWatch.start()
            dist.init_process_group(device.collective_backend(), timeout=timeout, **store_of_this_start(timeout))
        axes = Axes.start(parallel, timeout_s)
        world, rank = dist.get_world_size(), dist.get_rank()
        rollout = None
        for start in range(0, world, rollout_tp):  # every rank must make every group, in the same order
            ranks = list(range(start, start + rollout_tp))
            group = dist.new_group(ranks, backend="gloo", timeout=timeout)
            if rank in ranks:
                rollout = Axis(rollout_tp, rank - start, group, tuple(ranks))
        host_group = dist.new_group(backend="gloo", timeout=timeout)
        for axis in axes.connected():  # NCCL connects at the first call: now, when all ranks are here, and an error is one of the start
            dist.all_reduce(torch.zeros(1, device=device.device()), group=axis.group)
        return cls(axes, rollout, host_group, watch, timeout_s)

    # --- the logic block and the few ways data moves; see comm.py -------------------------------------------------

    def on_rank0(self, fn: Callable[..., Any], *args: Any) -> Any:
        """Collective. Run `fn(*args)` on rank 0 and give its result to every rank; what it raises is raised on every rank."""
        return comm.on_rank0(self.host_group, fn, *args)

    def all_gather(self, value: Any) -> list[Any]:
        """Collective. Every rank's picklable `value`, by rank."""
        return comm.all_gather(self.host_group, value)

    def all_ok(self, error: BaseException | None) -> None:
        """Collective. Raises on every rank if any rank brings an error, naming the rank."""
        comm.all_ok(self.host_group, error)

    @contextlib.contextmanager
    def together(self) -> Iterator[None]:
        """Collective at the end of the block, which each rank runs for itself: an error in it is raised on every rank, naming the rank."""
        error = None
        try:
            yield
        except Exception as e:
            error = e
        self.all_ok(error)

    def barrier(self) -> None:
        """Collective."""
        dist.barrier(self.host_group)

    def scatter(self, samples: list, assign: Callable[[list[int], int], list[list[int]]]) -> list:
        """Collective. Give each data-parallel rank its part of all ranks' samples.

        assign(costs, dp) returns for each dp rank the indices it gets; called once per mini batch with costs in tokens.
        Every rank of a data-parallel replica (its tp x pp ranks) gets the same list, in (mini batch, group, index) order.
        """
        return comm.scatter(self.host_group, samples, self.replicas, assign)

    def gather(self, samples: list, with_tokens: bool = False) -> list:
        """Collective. On rank 0 the samples of all replicas in (group, index) order, elsewhere an empty list.

        Token tensors stay where they are unless `with_tokens`, and routes always.
        """
        is_leader = self.rank == self.replicas[self.dp.index][0]
        mine = [s.without_routes() if with_tokens else s.without_tokens() for s in samples] if is_leader else []
        return comm.gather(self.host_group, mine)

    def gather_from_engines(self, samples: list, with_tokens: bool = False) -> list:
        """Collective. On rank 0 what the owners of the engines have generated, in (group, index) order, elsewhere an empty list.

        Token tensors stay where they are unless `with_tokens`.
        """
        return comm.gather(self.host_group, samples if with_tokens else [s.without_tokens() for s in samples])

    def sum(self, values: dict[str, float]) -> dict[str, float]:
        """Collective. Sum of each named number over the data-parallel ranks (the same keys on every rank)."""
        names = sorted(values)
        total = torch.tensor([values[n] for n in names], dtype=torch.float64, device=device.device())
        dist.all_reduce(total, group=self.dp.group)
        return dict(zip(names, total.tolist(), strict=True))

    def close(self) -> None:
        """Collective. End the process groups in an orderly way: a rank that leaves early can hang another's teardown."""
        self.barrier()
        self.watch.leave()
        dist.destroy_process_group()


def _axis(group: dist.ProcessGroup) -> Axis:
    ranks = tuple(dist.get_process_group_ranks(group))
    return Axis(len(ranks), ranks.index(dist.get_rank()), group, ranks)


def store_of_this_start(timeout: datetime.timedelta) -> dict[str, Any]:
    """Arguments of init_process_group. A rank alone needs no store that others can reach, nor a port, which another run could take first.

    torchrun's store outlives a restart of its ranks (torch 2.11), and with it the addresses of those that are dead: groups that are made
    with these wait for ever. So each start has a part of the store to itself.
    """
    if os.environ["WORLD_SIZE"] == "1":
        return {"store": dist.HashStore(), "rank": 0, "world_size": 1}
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return {}
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    store = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), world_size, is_master=False, timeout=timeout)
    start = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    return {"store": dist.PrefixStore(f"start_{start}", store), "rank": rank, "world_size": world_size}


def single_rank_env() -> None:
    """Without a launcher this process is the only rank."""
    if "RANK" not in os.environ:
        os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", LOCAL_WORLD_SIZE="1")


def check_sizes(parallel: ParallelConfig, rollout_tp: int, world_size: int) -> None:
    """Raises ConfigError with every number when the axes do not fit the number of ranks."""
    p = parallel
    numbers = f"ranks={world_size}, tp={p.tp}, pp={p.pp}, cp={p.cp}, ep={p.ep}, etp={p.etp}, vpp={p.vpp}, rollout.tp={rollout_tp}"
    if p.vpp > 1 and p.pp == 1:
        raise ConfigError(f"parallel.vpp={p.vpp} divides a pipeline's stages further, and parallel.pp is 1 ({numbers})")
    if world_size % (p.tp * p.pp * p.cp):
        raise ConfigError(f"the number of ranks must be a multiple of tp*pp*cp={p.tp * p.pp * p.cp} ({numbers})")
    if world_size % (p.etp * p.ep * p.pp):
        raise ConfigError(f"the number of ranks must be a multiple of etp*ep*pp={p.etp * p.ep * p.pp} ({numbers})")
    if world_size % rollout_tp:
        raise ConfigError(f"rollout.tp must divide the number of ranks ({numbers})")
