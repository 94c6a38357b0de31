"""CUDA IPC by the driver's own calls: share device memory that PyTorch's allocator holds, without PyTorch's bookkeeping around it.

`Storage._share_cuda_` counts references across processes and keeps a freed storage alive until the other process lets go; a window is
open for the length of one load only, and whoever opened it closes it by itself, so that the actor's memory stays the actor's.
"""

from __future__ import annotations

import ctypes
import functools
import os

from megaflow.types import PreflightError

_HANDLE_BYTES = 64  # CU_IPC_HANDLE_SIZE
_LAZY_PEER_ACCESS = 1  # CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS: the memory may lie on another GPU


class _Handle(ctypes.Structure):
    _fields_ = [("reserved", ctypes.c_char * _HANDLE_BYTES)]


@functools.cache
def _driver() -> ctypes.CDLL:
    """The driver library that PyTorch has loaded. Its calls need a current context: make one before (any CUDA tensor does)."""
    lib = ctypes.CDLL("libcuda.so.1")
    pointer, size = ctypes.POINTER(ctypes.c_uint64), ctypes.POINTER(ctypes.c_size_t)
    lib.cuMemGetAddressRange_v2.argtypes = [pointer, size, ctypes.c_uint64]
    lib.cuIpcGetMemHandle.argtypes = [ctypes.POINTER(_Handle), ctypes.c_uint64]
    lib.cuIpcOpenMemHandle_v2.argtypes = [pointer, _Handle, ctypes.c_uint]
    lib.cuIpcCloseMemHandle.argtypes = [ctypes.c_uint64]
    lib.cuGetErrorName.argtypes = [ctypes.c_int, ctypes.POINTER(ctypes.c_char_p)]
    return lib


def _call(name: str, *arguments) -> None:
    code = getattr(_driver(), name)(*arguments)
    if code:
        text = ctypes.c_char_p()
        _driver().cuGetErrorName(code, ctypes.byref(text))
        raise RuntimeError(f"{name} failed: {(text.value or b'unknown').decode()} ({code})")


def refuse_expandable_segments() -> None:
    """Raises PreflightError: the driver cannot export memory that the allocator maps piece by piece."""
    for variable in ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"):
        if "expandable_segments:true" in os.environ.get(variable, "").replace(" ", "").lower():
            raise PreflightError(
                f"{variable}={os.environ[variable]}: weights in expandable segments cannot be shared with the engine through CUDA IPC. "
                "Take expandable_segments out, or set sync.transport=buckets"
            )


def segment_of(address: int) -> tuple[int, int]:
    """(first address, bytes) of the allocation, as the driver made it, in which a device address lies."""
    base, nbytes = ctypes.c_uint64(), ctypes.c_size_t()
    _call("cuMemGetAddressRange_v2", ctypes.byref(base), ctypes.byref(nbytes), address)
    return base.value, nbytes.value


def export_segment(base: int) -> str:
    """Handle (hex) of a whole allocation."""
    handle = _Handle()
    _call("cuIpcGetMemHandle", ctypes.byref(handle), base)
    return bytes(handle).hex()


def open_segment(handle: str) -> int:
    """Where another process's allocation begins in this one. On the current device: no context is made on the one that owns it."""
    base = ctypes.c_uint64()
    _call("cuIpcOpenMemHandle_v2", ctypes.byref(base), _Handle.from_buffer_copy(bytes.fromhex(handle)), _LAZY_PEER_ACCESS)
    return base.value


def close_segment(base: int) -> None:
    """Undo open_segment."""
    _call("cuIpcCloseMemHandle", base)
