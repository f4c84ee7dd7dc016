"""The memory fraction: a hard bound on what a worker's tensors take of its device's memory.

Without one, torch's allocator takes memory as it is needed, and keeps it. The bound is torch's own
(``set_per_process_memory_fraction``): tensors and what the allocator keeps for later count, CUDA's
context and libraries (some 500 MiB) do not. A worker that needs more gets torch's out-of-memory
error, however much is free. Not measured on a GPU yet.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import torch

from quorate.errors import SettingError
from quorate.settings import real


def checked_fraction(fraction: object, devices: Sequence[torch.device]) -> float | None:
    """Return a fraction that every worker can have.

    Args:
        fraction: of a device's memory, above 0 and at most 1; None for no bound.
        devices: one per worker.

    Raises:
        SettingError: it is no such number, or workers on one device may take more than there is.
    """
    if fraction is None:
        return None
    number = real("memory_fraction", fraction, above=0)
    if number > 1:
        raise SettingError("memory_fraction", fraction, "at most 1", "it is of a device's memory")
    for device, workers in Counter(devices).items():
        if number * workers > 1 + 1e-9 and _can_be_bounded(device):
            most = f"at most {1 / workers:.3g} for each of the {workers} workers on {device}"
            raise SettingError("memory_fraction", fraction, most, "lower it, or fewer workers")
    return number


def bound_memory(devices: Sequence[torch.device], fraction: float | None) -> None:
    """Bound what this process may take of the devices.

    torch bounds a process: workers that are threads of one share what they have together.

    Args:
        devices: of the workers in this process, one per worker.
        fraction: as ``checked_fraction`` returned it.
    """
    if fraction is None:
        return
    for device, workers in Counter(devices).items():
        if not _can_be_bounded(device):
            continue
        module, share = torch.get_device_module(device), min(1.0, fraction * workers)
        if device.type == "mps":  # there is one
            module.set_per_process_memory_fraction(share)
        else:
            module.set_per_process_memory_fraction(share, device)


def free_cache(devices: Sequence[torch.device]) -> None:
    """Give back what this process's allocator keeps of the devices: workers are others."""
    for kind in {device.type for device in devices if device.type != "cpu"}:
        empty_cache = getattr(torch.get_device_module(kind), "empty_cache", None)
        if empty_cache is not None:
            empty_cache()


def fraction_remark(devices: Sequence[torch.device], fraction: float | None) -> list[str]:
    """Return what to say of devices whose memory it does not bound: a script is to run on any."""
    kinds = {device.type for device in devices if not _can_be_bounded(device)}
    if fraction is None or not kinds:
        return []
    return [
        f"memory_fraction={fraction:g} has no effect on {', '.join(sorted(kinds))}: torch cannot "
        "limit memory there"
    ]


def _can_be_bounded(device: torch.device) -> bool:
    if device.type == "cpu":
        return False
    return hasattr(torch.get_device_module(device), "set_per_process_memory_fraction")
