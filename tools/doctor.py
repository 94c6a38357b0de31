"""What this machine has for megaflow, and what is wrong with it.

    python tools/doctor.py                                              this machine
    torchrun --nproc-per-node 2 tools/doctor.py                         and between its ranks; srun does it for all nodes of a job
    python tools/doctor.py --brief                                      one line

Each line is ok, warn (may fail or be slow) or bad (will fail), with how to mend it. Exit code 3 when something is bad.
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import os
import platform
import socket
import sys
from importlib import metadata
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # so that a clone works without installation

from megaflow import slurm
from megaflow.config.loading import load
from megaflow.plan import links, machine
from megaflow.types import PreflightError, UserError

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
    parser.add_argument("--config", help="whose run.root and run.cache_dir to look at (default: those of the schema)")
    parser.add_argument("overrides", nargs="*", metavar="section.key=value", help="of the configuration")
    options = parser.parse_intermixed_args()
    if options.brief:
        print(brief())
        return 0
    try:
        return examination(options)
    except UserError as error:
        print(error, file=sys.stderr)
        return error.exit_code


def examination(options: argparse.Namespace) -> int:
    """Collective under torchrun or srun: the first rank of each host looks at it, all take part in what is between them; rank 0 prints."""
    slurm.adopt(os.environ)
    run = load(options.config, options.overrides).config.run
    disk = {"run.root": run.root, **({"run.cache_dir": run.cache_dir} if run.cache_dir else {})}
    where = links.environment()
    found: list[machine.Finding] = []
    if where["LOCAL_RANK"] == 0:
        found += [*machine.examine(machine.CLONE, disk), *links.measure()]
    everywhere = over_ranks(found) if where["WORLD_SIZE"] > 1 else found
    if where["RANK"] == 0:
        print(*(finding.line() for finding in everywhere), sep="\n")
        print(verdict(everywhere))
    return PreflightError.exit_code if any(finding.state == "bad" for finding in everywhere) else 0


def over_ranks(found: list[machine.Finding]) -> list[machine.Finding]:
    """Collective. What all hosts found (with the host's name where there are several), that they agree, clocks and speed."""
    import torch.distributed as dist

    dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=180))
    mine = (socket.gethostname(), brief().partition(" ")[2] if found else "", found)
    all_ranks: list = [None] * dist.get_world_size()
    dist.all_gather_object(all_ranks, mine)
    hosts = [each for each in all_ranks if each[2]]
    several = len(hosts) > 1
    lines = [dataclasses.replace(f, name=f"{host}: {f.name}" if several else f.name) for host, _, findings in hosts for f in findings]
    lines += [agreement({host: text for host, text, _ in hosts})] if several else []
    lines += list(links.between_ranks())
    dist.destroy_process_group()
    return lines


def agreement(hosts: dict[str, str]) -> machine.Finding:
    """hosts: name -> what all must have in common."""
    if len(set(hosts.values())) == 1:
        return machine.Finding("ok", "hosts", f"{len(hosts)} agree: {next(iter(hosts.values()))}")
    text = "; ".join(f"{host}: {has}" for host, has in sorted(hosts.items()))
    return machine.Finding("bad", "hosts", f"they differ: {text}", "install the same packages and driver on all")


def verdict(found: list[machine.Finding]) -> str:
    counts = {state: sum(finding.state == state for finding in found) for state in ("ok", "warn", "bad")}
    return ", ".join(f"{count} {state}" for state, count in counts.items()) + (": runs will fail here" if counts["bad"] else "")


if __name__ == "__main__":
    sys.exit(main())
