"""The one door through which our code enters SGLang's processes: its plugin entry point (group `sglang.srt.plugins`, see setup.py).

Written for sglang 0.5.15. SGLang calls `register` in the engine and in every scheduler before anything starts. Each hook says why it
exists; tests/dist/test_shims.py fails when upstream no longer needs one of them.
"""

from __future__ import annotations

import hashlib
import logging
import os
import signal
import threading

HARMLESS = (  # log lines; a reward model's folder has no generation config
    "Ignore import error", "Failed to load NCCL library", "Cuda graph is disabled", "Signal handler is not added",
    "Failed to load generation config",
)  # fmt: skip
# Folder for temporary files, set by our engine for its child processes; without it the plugin stays out: it is somebody else's SGLang.
SCRATCH = "MEGAFLOW_ENGINE_SCRATCH"


def register() -> None:
    if SCRATCH not in os.environ:
        return
    quiet_logs()
    from megaflow.monitor import stacks
    from megaflow.rollout import engine_clock, latent_attention

    latent_attention.do_without_sparse_attention()
    stacks.install()  # for who asks what an engine that hangs is doing

    engine_clock.register()
    _leave_in_order()
    _leave_no_shared_memory()
    _spare_what_starting_made()
    _no_random_bias()
    _right_routes()
    import torch

    if not torch.cuda.is_available():
        _seeds_on_cpu()
        _plain_weights_on_cpu()
        _real_sleep_on_cpu()
        _experts_of_other_ranks_on_cpu()
        _routes_without_a_driver()
        _rotary_of_latent_attention_on_cpu()
    else:
        _fp32_on_cuda()


def _leave_in_order() -> None:
    """SIGTERM ends a scheduler in the middle of anything, with the trainer's buffers still open: CUDA then warns at the trainer's end that
    "Producer process has been terminated before all shared CUDA tensors released"."""
    if threading.current_thread() is threading.main_thread():  # in schedulers; in the host process a thread runs this
        signal.signal(signal.SIGTERM, _leave)


def _leave(signum, frame) -> None:
    from megaflow.rollout import engine_loader

    engine_loader.forget()
    os._exit(0)


def _leave_no_shared_memory() -> None:
    """Each scheduler makes a file in /dev/shm that shows its load, and nobody removes it (sglang 0.5.15)."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    HookRegistry.register("sglang.srt.managers.load_snapshot.shm_path_for", _path_of_load, HookType.REPLACE)


def _path_of_load(ipc_name: str) -> str:
    return os.path.join(os.environ[SCRATCH], f"load_{hashlib.sha256(ipc_name.encode()).hexdigest()[:16]}")


def _spare_what_starting_made() -> None:
    """See monitor/collector.py. Nothing else of a scheduler's start is left to do when its loop begins."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    from megaflow.monitor.collector import spare_what_is_there

    HookRegistry.register("sglang.srt.managers.scheduler.Scheduler.run_event_loop", lambda *_: spare_what_is_there(), HookType.BEFORE)


def _no_random_bias() -> None:
    """See score_head.py."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    from megaflow.rollout.score_head import without_random_bias

    target = "sglang.srt.model_loader.loader.DefaultModelLoader.load_weights_and_postprocess"
    HookRegistry.register(target, without_random_bias, HookType.AROUND)


def _right_routes() -> None:
    """See routes.own_copy, in_int16 and number_routers."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    from megaflow.rollout import routes

    recorder, runner = "state_capturer.routed_experts.RoutedExpertsCapturer", "model_executor.model_runner.ModelRunner"
    HookRegistry.register(f"sglang.srt.{recorder}._get_local_slice", routes.own_copy, HookType.AFTER)
    HookRegistry.register(f"sglang.srt.{recorder}.get_topk", routes.in_int16, HookType.AFTER)
    HookRegistry.register(f"sglang.srt.{runner}.init_routed_experts_capturer", routes.number_routers, HookType.BEFORE)


def quiet_logs() -> None:
    """SGLang imports every model it knows and logs an error for each whose optional package is missing (dozens of lines, all harmless)."""

    def keep(record: logging.LogRecord) -> bool:
        text = record.getMessage()
        return not text.startswith(HARMLESS)

    logging.getLogger("torch.utils.cpp_extension").setLevel(logging.ERROR)  # warns where there is a CUDA compiler and no GPU
    pynccl = "sglang.srt.distributed.device_communicators.pynccl_wrapper"
    folders = "sglang.srt.utils.hf_transformers.common"
    for name in ("sglang.srt.models.registry", "sglang.srt.entrypoints.engine", "sglang.srt.server_args", pynccl, folders):
        logging.getLogger(name).addFilter(keep)


def _seeds_on_cpu() -> None:
    """`sampling_seed` works only with deterministic inference, whose hash and batch-invariant kernels are Triton. The hash here is the same
    kind (murmur's 32-bit finaliser), in int64 arithmetic; torch's CPU kernels need no replacement for our purpose."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    HookRegistry.register("sglang.srt.batch_invariant_ops.enable_batch_invariant_mode", lambda *a, **k: None, HookType.REPLACE)
    HookRegistry.register("sglang.srt.layers.sampler.murmur_hash32", hash_columns, HookType.REPLACE)


def hash_columns(seed, positions, columns):
    """seed [n], positions [n], columns [m] -> [n, m] int64 in [0, 2^32): one uniform number for each vocabulary entry of each request."""
    import torch

    mask = 0xFFFFFFFF

    def mix(h):  # MurmurHash3's fmix32
        h = ((h ^ (h >> 16)) * 0x85EBCA6B) & mask
        h = ((h ^ (h >> 13)) * 0xC2B2AE35) & mask
        return h ^ (h >> 16)

    rows = mix(mix((seed.to(torch.int64) & mask) ^ 0x9E3779B9) ^ mix((positions.to(torch.int64).reshape(-1) + 1) & mask))
    return mix(rows[:, None] ^ mix(columns.to(torch.int64) + 0x7F4A7C15)[None])


def _plain_weights_on_cpu() -> None:
    """On CPUs with AMX SGLang repacks weights after loading; a sync writes parameters in place and needs them plain."""
    import sglang.srt.utils.common as common

    common.is_amx_tile_supported = False


def _experts_of_other_ranks_on_cpu() -> None:
    """See experts_on_cpu.py."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    from megaflow.rollout.experts_on_cpu import add_gated, own_experts

    HookRegistry.register("sglang.srt.layers.elementwise.fused_gate_sigmoid_mul_add", add_gated, HookType.REPLACE)
    HookRegistry.register("sglang.srt.layers.moe.fused_moe_native.moe_forward_native", own_experts, HookType.AROUND)


def _routes_without_a_driver() -> None:
    """See routes.unpinned_host_cache."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    from megaflow.rollout.routes import unpinned_host_cache

    HookRegistry.register("sglang.srt.state_capturer.base.BaseHostCache.__init__", unpinned_host_cache, HookType.REPLACE)


def _rotary_of_latent_attention_on_cpu() -> None:
    """See latent_attention.rotary_on_cpu."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    from megaflow.rollout.latent_attention import rotary_on_cpu

    HookRegistry.register("sglang.srt.layers.rotary_embedding.factory.get_rope_cpu", rotary_on_cpu, HookType.AROUND)


def _fp32_on_cuda() -> None:
    """See plain_in_fp32.py."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    from megaflow.rollout.plain_in_fp32 import dispatch_forward

    target = "sglang.srt.layers.utils.multi_platform.MultiPlatformOp.dispatch_forward"
    HookRegistry.register(target, dispatch_forward, HookType.AROUND)


def _real_sleep_on_cpu() -> None:
    """torch_memory_saver is CUDA only, and without it a released engine keeps every byte. On CPU the storages themselves are emptied."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    updater = "sglang.srt.managers.scheduler_components.weight_updater.SchedulerWeightUpdaterManager"
    HookRegistry.register(f"{updater}.release_memory_occupation", _after_release, HookType.AFTER)
    HookRegistry.register(f"{updater}.resume_memory_occupation", _before_resume, HookType.BEFORE)


def _after_release(result, updater, request):
    tags = request.tags or ["kv_cache", "weights"]
    for tag in tags:
        for t in _tensors(updater, tag):
            storage = t.untyped_storage()
            if storage.nbytes():
                t._megaflow_nbytes = storage.nbytes()
                storage.resize_(0)


def _before_resume(updater, request):
    for tag in request.tags or ["kv_cache", "weights"]:
        for t in _tensors(updater, tag):
            nbytes = getattr(t, "_megaflow_nbytes", 0)
            if nbytes and not t.untyped_storage().nbytes():
                t.untyped_storage().resize_(nbytes)


def _tensors(updater, tag: str) -> list:
    runner = updater.tp_worker.model_runner
    if tag == "weights":
        return list(runner.model.parameters())
    if tag == "kv_cache":
        pool = runner.token_to_kv_pool
        return list(pool.kv_buffer) if hasattr(pool, "kv_buffer") else [*pool.k_buffer, *pool.v_buffer]  # the first of latent attention
    return []
