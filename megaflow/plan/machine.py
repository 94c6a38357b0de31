"""What a machine must have for a run: packages, driver, shared memory, files, ports, disk, names. Each says how to mend what it finds.

A check never raises for what it looks for; it allocates next to nothing.
"""

from __future__ import annotations

import os
import platform
import re
import resource
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Literal

GIB = 2**30
CLONE = Path(__file__).resolve().parents[2]
FILES_WANTED = 4096  # a rank's sockets, engines' pipes and a checkpoint's files at once
SHM_WANTED = GIB  # NCCL's buffers between processes of a host
DISK_WANTED, DISK_LEAST = 20 * GIB, GIB
CHILD_SECONDS = 60.0
TORCHRUN_PORT = 29500  # without --standalone or --master-port


@dataclass(frozen=True)
class Finding:
    """state: ok; warn: a run may fail or be slow; bad: it will fail. mend: what to do, empty if nothing."""

    state: Literal["ok", "warn", "bad"]
    name: str
    text: str
    mend: str = ""

    def line(self) -> str:
        advice = f"; {self.mend}" if self.mend and self.state != "ok" else ""
        return f"{self.state:<4}  {self.name}: {self.text}{advice}"


def examine(root: Path, disk: dict[str, str]) -> Iterator[Finding]:
    """root: the clone, whose setup.py has the pins. disk: what is written where, name -> folder."""
    yield python_version(platform.python_version())
    yield from packages(pins(root / "setup.py"))
    yield from graphics()
    yield shared_memory()
    yield memfd()
    yield open_files(*resource.getrlimit(resource.RLIMIT_NOFILE))
    yield port(int(os.environ.get("MASTER_PORT", TORCHRUN_PORT)), is_ours="RANK" in os.environ)
    yield host_name(socket.gethostname(), int(os.environ.get("WORLD_SIZE", "1")) > int(os.environ.get("LOCAL_WORLD_SIZE", "1")))
    for name, folder in disk.items():
        yield free_disk(name, Path(folder).expanduser().absolute())


def python_version(version: str) -> Finding:
    new = tuple(int(part) for part in version.split(".")[:2]) >= (3, 12)
    return Finding("ok" if new else "bad", "python", version, "megatron-core 0.19 needs Python 3.12: make setup PYTHON=/path/to/python3.12")


def pins(setup: Path) -> dict[str, str]:
    """Package -> version, of what every profile needs: BASE, and SGLang."""
    text = setup.read_text()
    base = text[text.index("BASE = [") : text.index("]\n", text.index("BASE = ["))]
    sglang = re.search(r'^SGLANG = "(.*)"', text, re.MULTILINE)
    assert sglang is not None, setup
    return dict(re.findall(r"^\s*\"([\w.-]+)==([\w.+-]+)\"", base, re.MULTILINE) + [tuple(sglang[1].split("=="))])


def packages(wanted: dict[str, str], installed: Callable[[str], str] = metadata.version) -> Iterator[Finding]:
    """One line for those as pinned; one for each that is not."""
    as_pinned = []
    for name, version in wanted.items():
        try:
            found = installed(name).partition("+")[0]
        except metadata.PackageNotFoundError:
            yield Finding("bad", name, "not installed", f"pip install {name}=={version} (make setup installs all)")
            continue
        if found == version:
            as_pinned.append(name)
        else:
            yield Finding("warn", name, f"{found}, and setup.py pins {version}, which is what was tested", f"pip install {name}=={version}")
    if as_pinned:
        yield Finding("ok", "packages", f"{len(as_pinned)} of {len(wanted)} are as setup.py pins them")


def graphics() -> Iterator[Finding]:
    """Driver and GPUs as NVML says, then whether torch can use them."""
    import pynvml

    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        nvidia = Path("/dev/nvidia0").exists()
        mend = "/dev/nvidia0 is there but no driver library: start the container with --gpus all, or reinstall the driver"
        yield Finding("bad" if nvidia else "ok", "driver", "no NVIDIA driver" + ("" if nvidia else "; runs go on CPU"), mend)
        return
    handles = [pynvml.nvmlDeviceGetHandleByIndex(i) for i in range(pynvml.nvmlDeviceGetCount())]
    cuda = pynvml.nvmlSystemGetCudaDriverVersion()
    kinds = ", ".join(sorted({str(pynvml.nvmlDeviceGetName(h)) for h in handles}))
    version = f"{pynvml.nvmlSystemGetDriverVersion()} for CUDA {cuda // 1000}.{cuda % 1000 // 10}"
    yield Finding("ok", "driver", f"{version}, {len(handles)} GPU(s): {kinds}")
    for number, handle in enumerate(handles):
        memory = pynvml.nvmlDeviceGetMemoryInfo(handle)
        if memory.used > 0.05 * memory.total:
            text = f"{memory.used / 1e9:.1f} of {memory.total / 1e9:.1f} GB are in use by others"
            yield Finding("warn", f"GPU {number}", text, "see nvidia-smi; a run counts on the whole device")
    yield torch_and_cuda(cuda)


def torch_and_cuda(driver_cuda: int) -> Finding:
    import torch

    built = torch.version.cuda
    if torch.cuda.is_available():
        nccl = ".".join(map(str, torch.cuda.nccl.version()))
        return Finding("ok", "torch", f"CUDA {built}, NCCL {nccl}, {torch.cuda.device_count()} device(s) visible")
    if built is None:
        version = torch.__version__.partition("+")[0]
        return Finding("bad", "torch", "built without CUDA, on a machine with GPUs", f"pip install torch=={version}")
    if int(built.split(".")[0]) * 1000 > driver_cuda:
        return Finding("bad", "torch", f"built for CUDA {built}, the driver is older", f"update the driver to one for CUDA {built}")
    return Finding("bad", "torch", "sees no GPU", "is CUDA_VISIBLE_DEVICES empty, or another CUDA library in LD_LIBRARY_PATH?")


def shared_memory(folder: str = "/dev/shm") -> Finding:
    if not os.path.isdir(folder):
        return Finding("bad", "shared memory", f"no {folder}", "mount a tmpfs there")
    size = shutil.disk_usage(folder).total
    enough = size >= SHM_WANTED
    text = f"{folder} has {size / GIB:.2f} GiB"
    return Finding("ok" if enough else "warn", "shared memory", text, "NCCL wants 1 GiB: docker run --shm-size=16g")


READ_MEMFD = "import sys; print(open(f'/proc/{sys.argv[1]}/fd/{sys.argv[2]}', 'rb').read().decode())"


def memfd() -> Finding:
    """A child process reads this one's anonymous memory through /proc, as an engine reads a rank's."""
    try:
        fd = os.memfd_create("doctor")
        os.write(fd, b"seen")
        done = child(READ_MEMFD, str(os.getpid()), str(fd))
        os.close(fd)
    except OSError as error:
        return Finding("bad", "memfd", f"cannot be made: {error}", "allow memfd_create in the container's seccomp profile")
    if done.stdout.strip() == "seen":
        return Finding("ok", "memfd", "a child process reads it through /proc")
    last = (done.stderr.strip().splitlines() or ["no answer"])[-1]
    return Finding("bad", "memfd", f"a child process cannot read it: {last}", "mount /proc without hidepid, and use one PID namespace")


def child(code: str, *arguments: str) -> subprocess.CompletedProcess:
    """Python code in a process of its own, which finds this package wherever it was started."""
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join([str(CLONE), os.environ.get("PYTHONPATH", "")])}
    return subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True, timeout=CHILD_SECONDS, env=environ)


def open_files(soft: int, hard: int) -> Finding:
    enough = soft == resource.RLIM_INFINITY or soft >= FILES_WANTED
    may_raise = hard == resource.RLIM_INFINITY or hard >= FILES_WANTED
    how = f"ulimit -n {FILES_WANTED}" if may_raise else "raise it in /etc/security/limits.conf"
    text = "no limit" if soft == resource.RLIM_INFINITY else f"at most {soft}"
    return Finding("ok" if enough else "warn", "open files", text, f"{FILES_WANTED} are safe: {how}")


def port(number: int, is_ours: bool = False) -> Finding:
    """is_ours: a launcher has taken it for this job."""
    if is_ours:
        return Finding("ok", "port", f"{number} is this job's")
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", number))
        except OSError as error:
            return Finding("warn", "port", f"{number}: {error.strerror}", "another torchrun? --standalone takes a free one")
    return Finding("ok", "port", f"{number} is free")


def host_name(name: str, several_hosts: bool, resolve: Callable[[str], str] = socket.gethostbyname) -> Finding:
    try:
        address = resolve(name)
    except OSError as error:
        mend = f"add `<its address> {name}` to /etc/hosts: gloo and torchrun look it up"
        return Finding("bad" if several_hosts else "warn", "host name", f"{name} does not resolve: {error}", mend)
    if several_hosts and address.startswith("127."):
        mend = "other hosts would be sent to themselves: correct /etc/hosts, or set GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME"
        return Finding("bad", "host name", f"{name} is {address}", mend)
    return Finding("ok", "host name", f"{name} is {address}")


def free_disk(name: str, folder: Path) -> Finding:
    existing = next(each for each in (folder, *folder.parents) if each.exists())
    if not os.access(existing, os.W_OK):
        return Finding("bad", name, f"{existing} cannot be written", f"set another {name}")
    free = shutil.disk_usage(existing).free
    state = "ok" if free >= DISK_WANTED else "warn" if free >= DISK_LEAST else "bad"
    return Finding(state, name, f"{folder} has {free / GIB:.1f} GiB free", "free some; --dry-run says what the checkpoints of a run take")
