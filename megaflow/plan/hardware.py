"""Devices that a plan can be made for: what their makers say of them. Numbers to be divided by an efficiency, never reached as they are."""

from __future__ import annotations

from dataclasses import dataclass

from megaflow.registry import nearest
from megaflow.types import ConfigError


@dataclass(frozen=True)
class Device:
    """One GPU within a host of eight.

    memory         bytes that CUDA reports (a little less than is printed on the box)
    tflops         dense bf16, 1e12 operations a second
    memory_gb_s    of the device's own memory
    link_gb_s      NVLink to another device of the host, one direction
    host_gb_s      pinned host memory to the device, one direction
    network_gb_s   to another host, one direction, for each device
    """

    name: str
    memory: float
    tflops: float
    memory_gb_s: float
    link_gb_s: float
    host_gb_s: float
    network_gb_s: float


DEVICES = {
    "h200": Device("NVIDIA H200 141GB", 150.1e9, 989, 4800, 450, 55, 50),
    "h100": Device("NVIDIA H100 SXM 80GB", 84.9e9, 989, 3350, 450, 55, 50),
    "a100": Device("NVIDIA A100 SXM 80GB", 85.0e9, 312, 2039, 300, 25, 25),
}


def device_named(name: str) -> Device:
    """Raises ConfigError for a device that is not in the table."""
    if name.lower() not in DEVICES:
        raise ConfigError(f"command line: --device {name} is not known{nearest(name, list(DEVICES))}; known: {', '.join(DEVICES)}")
    return DEVICES[name.lower()]
