"""The memory fraction: a hard bound on a worker's tensors as a share of its device's memory.

By default torch's allocator takes memory when needed, and frees none. The bound is torch's own
(``set_per_process_memory_fraction``): tensors and the allocator's reserve count, CUDA's context and
libraries (some 500 MiB) do not. A worker that needs more gets torch's out-of-memory error, even if
the device has free memory. Not measured on a GPU yet.
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
        fraction: fraction of a device's memory, above 0 and at most 1; None for no bound.
        devices: the devices, one per worker.

    Raises:
        SettingError: the value is no such number, or the workers of a device could exceed its
            memory.
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
    """Bound the memory of the devices that this process may use.

    torch bounds a whole process: workers that are threads of one process share their total.

    Args:
        devices: the devices of the workers in this process, one per worker.
        fraction: the result of ``checked_fraction``.
    """
    if fraction is None:
        return
    for device, workers in Counter(devices).items():
        if not _can_be_bounded(device):
            continue
        module, share = torch.get_device_module(device), min(1.0, fraction * workers)
        if device.type == "mps":  # there is a single MPS device
            module.set_per_process_memory_fraction(share)
        else:
            module.set_per_process_memory_fraction(share, device)


def free_cache(devices: Sequence[torch.device]) -> None:
    """Free the device memory cached by this process: worker processes need the memory."""
    for kind in {device.type for device in devices if device.type != "cpu"}:
        empty_cache = getattr(torch.get_device_module(kind), "empty_cache", None)
        if empty_cache is not None:
            empty_cache()


def fraction_remark(devices: Sequence[torch.device], fraction: float | None) -> list[str]:
    """Return a remark on devices without a bound: not an error, for portable scripts."""
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
