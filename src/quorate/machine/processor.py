"""Processors: the properties of a processor that choose kernels and so affect the bits.

torch and its libraries choose kernels by a processor's instruction set and maker; different
kernels round differently.
"""

from __future__ import annotations

import platform
from collections.abc import Iterable

import torch

from quorate.machine.environment import kernel_environment
from quorate.machine.host import processor_field


def processors(devices: Iterable[torch.device]) -> list[str]:
    """Return the CPU and the devices: ``["AuthenticAMD AVX512", "NVIDIA H200"]``.

    The CPU is always included: it adds gradients and makes updates.
    """
    maker = processor_field("vendor_id") or platform.machine()
    chosen = [f"{name}={value}" for name, value in kernel_environment().items()]
    cpu = " ".join([maker, torch.backends.cpu.get_cpu_capability(), *chosen])
    return [cpu, *sorted({_name(device) for device in devices if device.type != "cpu"})]


def _name(device: torch.device) -> str:
    module = torch.get_device_module(device)
    if hasattr(module, "get_device_name"):
        return str(module.get_device_name(device))
    return device.type
