"""Threads that ask a store all the time while their process ends: it ends with its own exit code."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.ranks import free_port

ROOT = Path(__file__).parents[2]

PEERS = """
import os, sys, time
from megaflow.parallel import peers
peers.PERIOD_S = 0.0
watch = peers.PeerWatch.start()
time.sleep(0.2)
sys.exit(3)
"""
COURIER = """
import os, sys, time
import torch.distributed as dist
from megaflow.monitor.courier import Courier
store = dist.TCPStore("127.0.0.1", int(os.environ["MASTER_PORT"]), 1, True, wait_for_workers=False)
Courier(store, 0, 2, 0.0, 0.0)
time.sleep(0.2)
sys.exit(3)
"""


@pytest.mark.parametrize("program", [PEERS, COURIER], ids=["peer-watch", "courier"])
def test_a_process_ends_with_its_own_exit_code(program):
    """A thread that is left within the store aborts it, with code 134."""
    env = os.environ | {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "PYTHONPATH": str(ROOT)}
    for _ in range(2):
        port = {"MASTER_PORT": str(free_port())}
        done = subprocess.run([sys.executable, "-c", program], env=env | port, capture_output=True, text=True, timeout=60)
        assert done.returncode == 3, done.stderr
