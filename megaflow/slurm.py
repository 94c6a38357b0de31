"""Started by srun instead of torchrun: which rank this is, told in the variables that torchrun would set. No torch here."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Callable, MutableMapping

from megaflow.types import ConfigError

SCONTROL_S = 30.0
FIRST_PORT, PORTS = 20000, 20000  # below the range that Linux hands out for outgoing connections
STEP = (
    "SLURM_PROCID", "SLURM_LOCALID", "SLURM_NODEID", "SLURM_STEP_TASKS_PER_NODE", "SLURM_STEP_NODELIST", "SLURM_JOB_ID", "SLURM_STEP_ID",
)  # fmt: skip


def expand_with_scontrol(node_list: str) -> list[str]:
    """Slurm's compressed host names ("gpu[01-03,7]") one by one."""
    try:
        found = subprocess.run(["scontrol", "show", "hostnames", node_list], capture_output=True, text=True, check=True, timeout=SCONTROL_S)
    except (OSError, subprocess.SubprocessError) as error:
        raise ConfigError(f"scontrol does not say which hosts {node_list} are ({error}): set MASTER_ADDR to the first one") from error
    return found.stdout.split()


def adopt(environ: MutableMapping[str, str], expand: Callable[[str], list[str]] = expand_with_scontrol) -> bool:
    """Set RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR and MASTER_PORT in `environ` from those of a Slurm step.

    Returns False, and changes nothing, outside a step of several tasks and where torchrun has said already. MASTER_ADDR and MASTER_PORT are
    kept if they are set. Raises ConfigError when Slurm's description of the step makes no sense.
    """
    if "RANK" in environ or int(environ.get("SLURM_STEP_NUM_TASKS", "1")) < 2:
        return False  # a batch script has SLURM_PROCID too, but no step's number of tasks
    missing = [name for name in STEP if name not in environ]
    if missing:
        raise ConfigError(f"this Slurm step does not set {', '.join(missing)}; start its ranks with torchrun instead")
    environ.update(
        RANK=environ["SLURM_PROCID"],
        WORLD_SIZE=environ["SLURM_STEP_NUM_TASKS"],
        LOCAL_RANK=environ["SLURM_LOCALID"],
        LOCAL_WORLD_SIZE=str(tasks_of_node(environ["SLURM_STEP_TASKS_PER_NODE"], int(environ["SLURM_NODEID"]))),
    )
    nodes = environ["SLURM_STEP_NODELIST"]
    environ.setdefault("MASTER_ADDR", expand(nodes)[0] if re.search(r"[\[,]", nodes) else nodes)
    environ.setdefault("MASTER_PORT", str(port_of_step(int(environ["SLURM_JOB_ID"]), int(environ["SLURM_STEP_ID"]))))
    return True


def tasks_of_node(tasks_per_node: str, node: int) -> int:
    """Of SLURM_STEP_TASKS_PER_NODE, e.g. "8(x2),4": eight tasks on nodes 0 and 1, four on node 2."""
    counts: list[int] = []
    for part in tasks_per_node.split(","):
        matched = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part)
        if matched is None:
            raise ConfigError(f"SLURM_STEP_TASKS_PER_NODE={tasks_per_node} is not of the form 8(x2),4; start with torchrun instead")
        counts += [int(matched[1])] * int(matched[2] or 1)
    if node >= len(counts):
        raise ConfigError(f"SLURM_NODEID={node}, but SLURM_STEP_TASKS_PER_NODE={tasks_per_node} tells of {len(counts)} node(s)")
    return counts[node]


def port_of_step(job: int, step: int) -> int:
    """The same on all ranks, and different for jobs that share a node."""
    return FIRST_PORT + (job * 16 + step) % PORTS
