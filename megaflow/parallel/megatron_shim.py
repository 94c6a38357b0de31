"""Everything that we change in Megatron-core and in the CUDA calls it makes, each with its reason. Needed for: megatron-core 0.19.2.

`install()` must run before the first `import megatron`. On a machine with a GPU only the mends of the checkpoint code apply.
tests/dist/test_shims.py fails when upstream no longer needs one of them.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import queue
import warnings
from collections.abc import Callable
from types import SimpleNamespace

import torch
import torch.distributed as dist
from torch.overrides import TorchFunctionMode

from megaflow.parallel.device import on_cuda

_CPU = torch.device("cpu")


@functools.cache
def install() -> None:
    """Idempotent."""
    # megatron-core warns about each optional package it does not find; the log says once which path each kernel takes
    warnings.filterwarnings("ignore", module=r"megatron\..*")
    warnings.filterwarnings("ignore", message=r".*(apex|Apex|transformer_engine|Transformer Engine|flash).*")
    logging.getLogger("megatron").setLevel(logging.ERROR)  # it also warns that GPTModel is deprecated: see actor/model.py
    logging.getLogger("torch.utils.cpp_extension").setLevel(logging.ERROR)  # warns where there is a CUDA compiler and no GPU
    if on_cuda():
        os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")  # Megatron's overlap relies on kernels starting in order
    _import_without_a_compiler()
    if not on_cuda():
        _cuda_api_on_cpu()
    _mend_checkpointing()


def _import_without_a_compiler() -> None:
    """Megatron-core decorates small functions with torch.compile, and the decorator alone imports dynamo and inductor: a third of the time
    that a start's imports take. Of these functions only parts of the experts' router are used here; they run as written."""

    def as_it_is(function=None, **_):
        return function or as_it_is

    compile_, torch.compile = torch.compile, as_it_is
    try:
        import megatron.core.jit  # noqa: F401 (binds it for all later modules)
    finally:
        torch.compile = compile_


def _cuda_api_on_cpu() -> None:
    """Megatron-core names "cuda" as a device, makes streams and events, and keeps a CUDA random state. All of it maps to the CPU."""
    cuda = torch.cuda
    cuda.current_device = lambda: _CPU
    cuda.synchronize = lambda *a, **k: None
    cuda.empty_cache = lambda: None
    cuda.Stream, cuda.Event = _Stream, _Event  # classes, since they stand in annotations such as `torch.cuda.Event | None`
    cuda.current_stream = cuda.default_stream = lambda *a: _STREAM
    cuda.stream = lambda stream: contextlib.nullcontext()
    torch.Tensor.record_stream = lambda self, stream: None
    _DevicesOnCPU().__enter__()
    cuda.manual_seed = torch.manual_seed
    cuda.get_rng_state = cuda.random.get_rng_state = lambda device=None: torch.random.get_rng_state()
    cuda.set_rng_state = cuda.random.set_rng_state = lambda state, device=None: torch.random.set_rng_state(state)
    import megatron.core.tensor_parallel.random as megatron_random

    megatron_random._get_cuda_rng_state = lambda device="cpu", clone=False, graph_safe=False: torch.random.get_rng_state()
    megatron_random._set_cuda_rng_state = lambda state, device=-1, graph_safe=False: torch.random.set_rng_state(state)
    _split_sizes_as_lists()
    _uneven_parts()


class _Event:
    def __init__(self, *args, **kwargs): ...
    def record(self, *args): ...
    def wait(self, *args): ...
    def synchronize(self): ...
    def query(self) -> bool:
        return True

    def elapsed_time(self, other) -> float:
        return 0.0


class _Stream:
    def __init__(self, *args, **kwargs): ...
    def wait_stream(self, *args): ...
    def wait_event(self, *args): ...
    def synchronize(self): ...
    def record_event(self, *args) -> _Event:
        return _Event()


_STREAM = _Stream()


def _to_cpu(device):
    return _CPU if isinstance(device, (str, torch.device)) and torch.device(device).type == "cuda" else device


class _DevicesOnCPU(TorchFunctionMode):
    """device="cuda", .cuda() and pinned memory on a machine that has neither."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func is torch.Tensor.cuda or func is torch.Tensor.pin_memory:
            return args[0]
        if func is torch.Tensor.to:
            args = tuple(_to_cpu(a) for a in args)
        elif func is torch.Tensor.type and len(args) == 1:
            return func(*args).replace("torch.", "torch.cuda.")  # Megatron's optimizer sorts parameters by 'torch.cuda.FloatTensor'
        if kwargs:
            if "device" in kwargs:
                kwargs = {**kwargs, "device": _to_cpu(kwargs["device"])}
            if kwargs.get("pin_memory"):
                kwargs = {**kwargs, "pin_memory": False}
            return func(*args, **kwargs)
        return func(*args)


def _split_sizes_as_lists() -> None:
    """The MoE dispatcher hands split sizes over as tensors, which gloo's all-to-all refuses (on CUDA it makes lists of them itself)."""
    original = dist.all_to_all_single

    @functools.wraps(original)
    def all_to_all_single(output, input, output_split_sizes=None, input_split_sizes=None, group=None, async_op=False):
        sizes = [s.tolist() if isinstance(s, torch.Tensor) else s for s in (output_split_sizes, input_split_sizes)]
        return original(output, input, *sizes, group=group, async_op=async_op)

    dist.all_to_all_single = all_to_all_single


def offer_weight_gradient(add_product: Callable[[torch.Tensor, torch.Tensor, torch.Tensor], None]) -> None:
    """`gradient_accumulation_fusion` without apex, whose extension Megatron's linear layers would call to add to `main_grad` at once.

    add_product(total, grad_output, inputs): total += grad_output.T @ inputs. Does nothing where apex's extension is installed.
    """
    import megatron.core.tensor_parallel.layers as layers

    if not layers._grad_accum_fusion_available:
        product = SimpleNamespace(wgrad_gemm_accum_fp32=lambda inputs, grad_output, total: add_product(total, grad_output, inputs))
        layers.fused_weight_gradient_mlp_cuda, layers._grad_accum_fusion_available = product, True


def _uneven_parts() -> None:
    """Experts cut by etp gather and reduce-scatter tokens in parts of different sizes, which NCCL takes and gloo refuses."""
    all_gather, reduce_scatter = dist.all_gather, dist.reduce_scatter

    @functools.wraps(all_gather)
    def gather(outputs, tensor, group=None, async_op=False):
        if len({t.shape for t in outputs}) == 1:
            return all_gather(outputs, tensor, group=group, async_op=async_op)
        outputs[dist.get_rank(group)].copy_(tensor)
        for i, part in enumerate(outputs):
            dist.broadcast(part, dist.get_global_rank(group, i), group=group)
        return None

    @functools.wraps(reduce_scatter)
    def scatter(output, inputs, op=dist.ReduceOp.SUM, group=None, async_op=False):
        if len({t.shape for t in inputs}) == 1:
            return reduce_scatter(output, inputs, op=op, group=group, async_op=async_op)
        for i, part in enumerate(inputs):
            total = part.clone(memory_format=torch.contiguous_format)
            dist.all_reduce(total, op, group=group)
            if i == dist.get_rank(group):
                output.copy_(total)
        return None

    dist.all_gather, dist.reduce_scatter = gather, scatter


def _mend_checkpointing() -> None:
    import megatron.core.dist_checkpointing.strategies.filesystem_async as filesystem_async
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

    # Saving starts a multiprocessing Manager only to get a queue; it re-imports __main__ and outlives a killed trainer.
    filesystem_async._results_queue = queue.Queue()

    # With torch's Adam (no apex, no TE) the optimizer state has a `step` that a fully_reshardable checkpoint does not carry per parameter.
    original = DistributedOptimizer._set_main_param_and_optimizer_states

    @functools.wraps(original)
    def set_states(self, model_param, tensors):
        group, order = self.model_param_group_index_map[model_param]
        state = self.optimizer.state[self.optimizer.param_groups[group]["params"][order]]
        if "step" in state and "step" not in tensors:
            tensors = {**tensors, "step": state["step"]}
        return original(self, model_param, tensors)

    DistributedOptimizer._set_main_param_and_optimizer_states = set_states
