"""Processors: which kernels compute, as far as their results depend on it.

torch and its libraries choose kernels by the instructions that a processor has, and by its maker;
other kernels round in another way.
"""

from __future__ import annotations

import platform
from collections.abc import Iterable

import torch

from quorate.machine.environment import kernel_environment
from quorate.machine.host import processor_field


def processors(devices: Iterable[torch.device]) -> list[str]:
    """Return what the CPU and the devices are: ``["AuthenticAMD AVX512", "NVIDIA H200"]``.

    The CPU is among them always: it adds gradients and makes updates.
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
