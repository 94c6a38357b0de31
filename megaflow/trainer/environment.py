"""env.json: what ran where, so that a result can be made again."""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil

import megaflow
from megaflow.monitor.metrics import replace_text

PACKAGES = ("torch", "megatron-core", "sglang", "transformers", "omegaconf", "safetensors", "numpy", "triton", "transformer-engine")


def versions() -> dict[str, str | None]:
    """Installed versions, without importing anything; None: not installed."""
    found: dict[str, str | None] = {"megaflow": megaflow.__version__, "python": platform.python_version()}
    for package in PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            found[package] = None
    return found


def git_commit(folder: Path) -> str | None:
    """Commit of the repository that `folder` lies in, with `-dirty` when files differ from it; None outside one or without git."""
    try:
        command = ["git", "describe", "--always", "--dirty", "--abbrev=40"]
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=20)
    except (FileNotFoundError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() or None


def devices() -> dict[str, Any]:
    """Of rank 0's host."""
    import torch

    host = {"cpus": os.cpu_count(), "memory_gb": round(psutil.virtual_memory().total / 1e9, 1)}
    if not (torch.version.cuda and torch.cuda.is_available()):
        return host | {"gpus": []}
    names = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    return host | {"gpus": names, "cuda": torch.version.cuda}


def write_environment(path: Path, world_size: int) -> dict[str, Any]:
    """Write env.json and return its content."""
    env = {
        "started": time.strftime("%Y-%m-%d %H:%M:%S %z"),
        "argv": sys.argv,
        "folder": os.getcwd(),
        "hostname": socket.gethostname(),
        "platform": platform.platform(),
        "ranks": world_size,
        "devices": devices(),
        "git_commit": git_commit(Path(megaflow.__file__).parent),
        "versions": versions(),
    }
    replace_text(path, json.dumps(env, indent=2) + "\n")
    return env


def add_to_environment(path: Path, facts: dict[str, Any]) -> None:
    """What is known only after the start."""
    replace_text(path, json.dumps({**json.loads(path.read_text()), **facts}, indent=2) + "\n")
