"""The environment of an engine's processes: the rank's without the launcher's variables, and what SGLang reads."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import sys
from pathlib import Path

from megaflow.config.caches import cache_variables
from megaflow.config.schema import Config
from megaflow.parallel import device
from megaflow.rollout.sglang_plugin import SCRATCH

# A process that believes it is torchrun's worker waits for ever for a store that nobody serves (TORCHELASTIC_USE_AGENT_STORE).
LAUNCHER = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_", "ROLE_", "MASTER_", "TORCHELASTIC")


def engine_environment(config: Config, engine_index: int, scratch: str = "") -> dict[str, str]:
    """For the host process and its children. This process's own environment stays as it is. scratch: folder for temporary files."""
    ours = {name: value for name, value in os.environ.items() if not name.startswith(LAUNCHER)}
    wanted = {
        SCRATCH: scratch,
        "PYTHONWARNINGS": "ignore",  # its imports warn of every optional kernel that is not there
        "PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path),  # also what was added since the start
        "TQDM_DISABLE": "1",  # a progress bar for each captured graph
        "SGLANG_ENABLE_TP_MEMORY_INBALANCE_CHECK": "0",  # it compares free memory over GPUs while the actor is being built on them
        "SGLANG_NUMA_BIND_V2": "0",  # binding before a process begins, which ours have done when SGLang knows the node; 0: within it
        "SGLANG_DISABLED_MODEL_ARCHS": ",".join(other_models(config.model.path)),
        **cache_variables(config.run.cache_dir),
    }
    return {**ours, **wanted, **({} if device.on_cuda() else _on_cpu(config, engine_index))}


def _on_cpu(config: Config, engine_index: int) -> dict[str, str]:
    cores = sorted(os.sched_getaffinity(0))
    first = engine_index * config.rollout.tp
    return {
        "SGLANG_USE_CPU_ENGINE": "1",
        "SGLANG_CPU_OMP_THREADS_BIND": "|".join(str(cores[(first + i) % len(cores)]) for i in range(config.rollout.tp)),
        "TORCHDYNAMO_DISABLE": "1",  # inductor would compile C++ for a quarter of a minute and save microseconds
        "SGLANG_NCCL_SO_PATH": "/nonexistent",  # no NCCL on a CPU host; without this tp > 1 tries it
    }


def other_models(model_path: str) -> list[str]:
    """SGLang's model files that do not define this model. It imports all 180 of them in each process, for 3 s and more, unless told not to.

    Empty, so that SGLang looks for itself, when none defines it.
    """
    sglang = importlib.util.find_spec("sglang")
    if sglang is None or sglang.origin is None:
        return []
    wanted = json.loads((Path(model_path) / "config.json").read_text()).get("architectures") or []
    defines = re.compile(r"^class (" + "|".join(map(re.escape, wanted)) + r")\b", re.MULTILINE) if wanted else None
    files = sorted(Path(sglang.origin).parent.glob("srt/models/*.py"))
    needed = {file.stem for file in files if defines and defines.search(file.read_text())}
    return [file.stem for file in files if file.stem not in needed and file.stem != "__init__"] if needed else []
