"""Devices: from what a user types to one torch device per worker.

`--devices` is a comma-separated list of torch's own names: ``cpu``, ``cuda`` (all visible ones),
``cuda:1``, ``mps``. Workers are dealt over the list in turn.
"""

from __future__ import annotations

import copy
import os
from collections import Counter
from collections.abc import MutableMapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import torch

from quorate import control_group
from quorate.errors import SettingError
from quorate.settings import device_environment, whole
from quorate.visible_devices import VARIABLE, why_none

MOST_CPU_WORKERS = 8

# There where the kernel has NVIDIA's driver (on Linux; elsewhere the doctor knows more).
DRIVER = Path("/proc/driver/nvidia/version")

Devices = str | torch.device | Sequence[str | torch.device] | None


def worker_devices(devices: Devices, workers: int | None) -> tuple[torch.device, ...]:
    """One device per worker.

    Args:
        devices: devices or names, as a list or separated by commas; None means every visible GPU,
            or the CPU with one worker per core, at most 8.
        workers: how many workers there are; None means one per entry.

    Raises:
        SettingError: an unknown or absent device, or a number of workers below one.
    """
    if workers is not None:
        workers = whole("workers", workers, least=1)
    if devices is None:
        listed = _default_devices(workers)
    else:
        names: Sequence[object]
        if isinstance(devices, (str, torch.device)):
            names = str(devices).split(",")
        elif isinstance(devices, Sequence):
            names = devices
        else:
            raise SettingError("devices", devices, "names of devices", 'for example "cpu"')
        listed = [device for name in names for device in _parse(str(name).strip())]
        if not listed:
            raise SettingError("devices", devices, "at least one device", "name one: cpu, cuda:0")
    count = len(listed) if workers is None else workers
    return tuple(listed[i % len(listed)] for i in range(count))


def describe(devices: Sequence[torch.device]) -> str:
    """``2 cpu workers``, ``cuda:0, cuda:1 x 2``: how many workers on what."""
    counts = Counter(map(str, devices))
    if len(counts) == 1:
        (name, count), *_ = counts.items()
        return f"{count} {name} worker{'s' if count > 1 else ''}"
    listed = ", ".join(n if c == 1 else f"{n} x {c}" for n, c in counts.items())
    return f"{len(devices)} workers on {listed}"


def move(batch: Any, device: torch.device) -> Any:
    """The batch with every tensor in it on the device: tensors, lists, tuples, dicts, nested."""
    if isinstance(batch, torch.Tensor):
        return batch.to(device, non_blocking=True)
    if isinstance(batch, MutableMapping):
        moved = copy.copy(batch)
        moved.update({name: move(value, device) for name, value in batch.items()})
        return moved
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(move(value, device) for value in batch))
    if isinstance(batch, (list, tuple)):
        return type(batch)(move(value, device) for value in batch)
    return batch


def usable_cores() -> int:
    """Cores this process may run on: by its affinity, and by the limit of its container."""
    cores = os.cpu_count() or 1
    if hasattr(os, "sched_getaffinity"):
        cores = len(os.sched_getaffinity(0))
    limit = _container_cores()
    return cores if limit is None else max(1, min(cores, int(limit)))


@cache
def _container_cores() -> float | None:
    return control_group.cores()  # it reads files, and an update asks


def _default_devices(workers: int | None) -> list[torch.device]:
    if torch.cuda.is_available():
        return _parse("cuda")
    cores = min(usable_cores(), MOST_CPU_WORKERS)
    return [torch.device("cpu")] * (cores if workers is None else 1)


def _parse(name: str) -> list[torch.device]:
    known = "cpu, cuda, cuda:N, mps or another device of this torch build"
    if "+" in name:
        raise SettingError(
            "devices", name, "one device per replica", "a replica over several is not supported yet"
        )
    try:
        device = torch.device(name)
    except RuntimeError:
        raise SettingError("devices", name, known, "check the spelling") from None
    if device.type == "cpu":
        if device.index:
            raise SettingError("devices", name, "cpu", "there is one CPU; see --workers")
        return [torch.device("cpu")]
    try:
        count = torch.get_device_module(device).device_count()
    except (AttributeError, RuntimeError):
        count = 0
    if count == 0:
        raise SettingError("devices", name, known, _why_none(device.type))
    if ":" not in name:
        return [torch.device(device.type, index) for index in range(count)]
    if device.index >= count:
        raise SettingError(
            "devices", name, f"{device.type}:0 to {device.type}:{count - 1}", "name one that exists"
        )
    return [device]


def _why_none(kind: str) -> str:
    """Why torch sees no device of a kind: the nearest cause first."""
    said = f"torch {torch.__version__} sees no {kind} device here"
    if kind != "cuda":
        return said
    reasons = []
    if torch.version.cuda is None and torch.version.hip is None:
        reasons.append("it is built without CUDA")
    value = device_environment().get(VARIABLE)
    if (hidden := why_none(value)) is not None:
        reasons.append(f"{VARIABLE}={value!r}: {hidden}")
    if not DRIVER.exists() and torch.version.hip is None:
        reasons.append("no NVIDIA driver is loaded")
    return f"{said}: {'; '.join(reasons or ['no reason is known'])}; see quorate doctor"
