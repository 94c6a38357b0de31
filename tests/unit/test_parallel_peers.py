"""Ranks that do not find each other say what to change."""

from __future__ import annotations

import socket

import pytest

from megaflow.parallel.peers import PeerWatch, meeting
from megaflow.types import PreflightError
from tests.ranks import free_port


@pytest.fixture
def port(monkeypatch: pytest.MonkeyPatch) -> int:
    found = free_port()
    for name, value in {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(found)}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("TORCHELASTIC_USE_AGENT_STORE", raising=False)
    return found


def test_a_port_in_use_is_named_with_the_way_out(port: int) -> None:
    with socket.socket() as other:
        other.bind(("", port + 1))
        other.listen()
        with pytest.raises(PreflightError, match=rf"port {port} or {port + 1} of 127.0.0.1 is in use .* --master-port N"), meeting():
            PeerWatch.start()


def test_what_the_network_says_is_passed_on_with_what_to_look_at(port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("MASTER_ADDR", "no-such-host.invalid")
    with pytest.raises(PreflightError, match=r"rank 1 does not find rank 0: .*is no-such-host.invalid \(MASTER_ADDR\) its host"), meeting():
        import torch.distributed as dist

        raise dist.DistNetworkError("the name or service is not known\nand more")
