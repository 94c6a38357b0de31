"""Ranks without torchrun, for programs that start several sets of them: import everything once, then fork, and save the imports' time."""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Callable

from tests.ranks import free_port


def start(ranks: int, work: Callable[[], None], port: int = 0) -> list[int]:
    """Process ids of `ranks` children that do `work` as the ranks of one job. Call it before anything here has used autograd or threads.

    port: for the job, which uses the next one as well; 0: any
    """
    port_text = str(port or free_port())
    pids = []
    for rank in range(ranks):
        pid = os.fork()
        if pid == 0:
            os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks)}
            os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port_text}
            os.setpgid(0, 0)
            _end(work)
        pids.append(pid)
    return pids


def _end(work: Callable[[], None]) -> None:
    """Leaves the child without the parent's clean-up."""
    code = 1
    try:
        work()
        code = 0
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else 1
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def wait(pids: list[int]) -> list[int]:
    """Exit codes; minus the signal's number for a killed one."""
    return [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]
