"""SGLang's arguments and environment for an embedded engine, on CUDA and on CPU."""

from __future__ import annotations

import contextlib
import os
from typing import Any

from megaflow.config.schema import Config
from megaflow.parallel import device
from megaflow.parallel.mesh import Mesh
from megaflow.rollout.sglang_plugin import ACTIVE, quiet_logs


def engine_args(config: Config, loaders: list[str]) -> Any:
    """sglang.srt.server_args.ServerArgs; to be made, as the engine itself, within `engine_env`."""
    quiet_logs()
    r = config.rollout
    common = {
        "model_path": config.model.path,
        "load_format": "dummy",  # the first sync brings the weights
        "dtype": config.model.dtype,
        "tp_size": r.tp,
        "skip_tokenizer_init": not config.sampling.stop,  # tokens in, tokens out; stop strings need its tokenizer
        "random_seed": config.run.seed,
        "mem_fraction_static": r.mem_fraction,
        "max_running_requests": r.max_running,
        "custom_weight_loader": loaders,
        "sampling_backend": "pytorch",
        "grammar_backend": "none",
        "log_level": "error",
        "disable_radix_cache": config.run.deterministic,  # a cached prefix is computed in another batch: equal but for the last bits
    }
    return _cuda(config, common) if device.on_cuda() else _cpu(config, common)


def _cuda(config: Config, common: dict[str, Any]) -> Any:
    from sglang.srt.server_args import ServerArgs

    backend = config.rollout.attention_backend
    return ServerArgs(
        **common,
        base_gpu_id=device.device().index,
        attention_backend="triton" if backend == "auto" else backend,
        max_total_tokens=config.rollout.max_tokens or None,
        enable_memory_saver=True,
        enable_weights_cpu_backup=config.rollout.sleep_level == "1",
        disable_cuda_graph=not config.rollout.cuda_graph,
        disable_prefill_cuda_graph=True,  # 58 captures, more than a minute; prefill gains little from them
        enable_deterministic_inference=config.run.deterministic,
    )


def _cpu(config: Config, common: dict[str, Any]) -> Any:
    from sglang.srt.server_args import ServerArgs

    args = ServerArgs(
        **{**common, "mem_fraction_static": 0.1},
        device="cpu",
        attention_backend="torch_native",
        disable_cuda_graph=True,
        sleep_on_idle=True,  # its scheduler polls without a pause, on a core that the trainer needs
        max_total_tokens=config.rollout.max_tokens or tokens_of_a_step(config),
    )
    # Without it seeds are ignored; its own checks refuse torch_native, whose kernels the plugin makes right for it.
    args.enable_deterministic_inference = True
    return args


def tokens_of_a_step(config: Config) -> int:
    """KV cache for as many requests as may run at once, at full length."""
    r = config.rollout
    longest = config.data.max_prompt_tokens + config.sampling.max_new_tokens
    at_once = min(r.max_running, r.prompts_per_step * r.samples_per_prompt)
    return max(4096, at_once * longest)


@contextlib.contextmanager
def engine_env(config: Config, mesh: Mesh | None):
    """For the time of the block, what the engine and its children read from the environment.

    Afterwards it is as before, also where SGLang has set NCCL's and CUDA's variables for its own processes: with NCCL_CUMEM_ENABLE=0 in one
    rank alone, the next communicator that this rank makes with another one fails ("invalid argument" on two H200s).
    """
    wanted = {ACTIVE: "1", "PYTHONWARNINGS": "ignore"}  # its imports warn of every optional kernel that is not there
    if not device.on_cuda():
        cores = sorted(os.sched_getaffinity(0))
        first = (mesh.engine_index if mesh else 0) * config.rollout.tp
        wanted["SGLANG_USE_CPU_ENGINE"] = "1"
        wanted["SGLANG_CPU_OMP_THREADS_BIND"] = "|".join(str(cores[(first + i) % len(cores)]) for i in range(config.rollout.tp))
        wanted["TORCHDYNAMO_DISABLE"] = "1"  # inductor would compile C++ for a quarter of a minute and save microseconds
        wanted["SGLANG_NCCL_SO_PATH"] = "/nonexistent"  # no NCCL on a CPU host; without this tp > 1 tries it
    before = dict(os.environ)
    os.environ.update(wanted)
    try:
        yield
    finally:
        ours = [k for k in os.environ if k in wanted or k.startswith(("NCCL_", "CUDA_"))]
        for name in ours:
            if name in before:
                os.environ[name] = before[name]
            else:
                del os.environ[name]
