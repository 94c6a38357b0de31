"""What this machine has for megaflow, and what is wrong with it.

    python tools/doctor.py --brief
"""

from __future__ import annotations

import argparse
import platform
import socket
import sys
from importlib import metadata
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # so that a clone works without installation

PACKAGES = ("megaflow", "torch", "megatron-core", "sglang", "transformers")


def brief() -> str:
    """One line: the host's name, then what all nodes of a job must have in common."""
    words = [socket.gethostname(), f"python={platform.python_version()}"]
    for name in PACKAGES:
        try:
            words.append(f"{name}={metadata.version(name)}")
        except metadata.PackageNotFoundError:
            words.append(f"{name}=missing")
    return " ".join(words + gpus())


def gpus() -> list[str]:
    """Driver, number and kinds of the GPUs, from NVML; nothing is allocated on them."""
    import pynvml

    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:  # no driver
        return ["gpus=0"]
    handles = [pynvml.nvmlDeviceGetHandleByIndex(i) for i in range(pynvml.nvmlDeviceGetCount())]
    kinds = sorted({str(pynvml.nvmlDeviceGetName(h)).replace(" ", "_") for h in handles})
    return [f"driver={pynvml.nvmlSystemGetDriverVersion()}", f"gpus={len(handles)}", *kinds]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--brief", action="store_true", help="one line of what all nodes of a job must have in common")
    parser.parse_args()
    print(brief())
    return 0


if __name__ == "__main__":
    sys.exit(main())
