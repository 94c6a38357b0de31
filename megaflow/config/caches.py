"""Where compiled kernels are kept between runs: without it every start would compile them again, for a minute and more on CUDA."""

from __future__ import annotations

import os
from pathlib import Path

# variable -> folder within run.cache_dir. Each library reads its own, most of them once, when it is imported.
CACHES = {
    "TRITON_CACHE_DIR": "triton",
    "TORCHINDUCTOR_CACHE_DIR": "inductor",
    "TVM_FFI_CACHE_DIR": "tvm-ffi",  # SGLang's CUDA kernels, compiled on first use
    "FLASHINFER_WORKSPACE_BASE": "flashinfer",
    "SGLANG_CACHE_DIR": "sglang",
    "SGLANG_DG_CACHE_DIR": "deep_gemm",
    "DG_JIT_CACHE_DIR": "deep_gemm",
    "CUDA_CACHE_PATH": "cuda",  # the driver's own, for PTX
}


def cache_variables(cache_dir: str) -> dict[str, str]:
    """What the environment lacks of CACHES; what the user has set stays. Empty cache_dir: nothing."""
    if not cache_dir:
        return {}
    root = Path(cache_dir).expanduser().absolute()
    return {name: str(root / folder) for name, folder in CACHES.items() if name not in os.environ}


def use_cache_dir(cache_dir: str) -> None:
    """For this process and its children. Before torch is imported."""
    os.environ.update(cache_variables(cache_dir))
