"""Devices: from the names typed by a user to the devices of each worker.

`--devices` is a comma-separated list of torch's own names: ``cpu``, ``cuda`` (all visible GPUs),
``cuda:1``, ``mps``, and ``cuda:0+cuda:1`` for a replica whose model is spread over two devices.
Workers are assigned to the entries in turn. Only CUDA is named in this module, because only a
missing CUDA device has a cause that can be explained. TensorFlow's names (``gpu:1``,
``/device:GPU:1``) are accepted.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from pathlib import Path

import torch

from quorate.errors import SettingError, nearest
from quorate.machine.device_names import in_torch
from quorate.machine.environment import device_environment
from quorate.machine.resources import MOST_CPU_WORKERS, usable_cores
from quorate.machine.visible_devices import VARIABLE, why_none
from quorate.settings import integer

# Exists if the kernel has NVIDIA's driver (on Linux; ``quorate doctor`` checks other systems).
DRIVER = Path("/proc/driver/nvidia/version")

KINDS = ("cpu", "cuda", "gpu", "mps", "xpu")  # kinds that users type; builds of torch know more

Devices = str | torch.device | Sequence[str | torch.device] | None


class Group(tuple[torch.device, ...]):
    """The devices of one worker's replica: nearly always a single device."""

    def __str__(self) -> str:
        return "+".join(map(str, self))


def worker_devices(devices: Devices, workers: int | None) -> tuple[Group, ...]:
    """Return the devices of each worker.

    Args:
        devices: devices or names, as a list or separated by commas; None means every visible GPU,
            or the CPU with one worker per core, at most 8.
        workers: number of workers; None means one per entry.

    Raises:
        SettingError: a device is unknown or absent, or ``workers`` is below one.
    """
    if workers is not None:
        workers = integer("workers", workers, least=1)
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


def describe(devices: Sequence[Group], least: int | None = None) -> str:
    """Return the workers and their devices in words: ``2 cpu workers``, ``cuda:0, cuda:1 x 2``.

    Args:
        least: least number of workers: ``2 to 8 cpu workers``. Default: all of them.
    """
    counts = Counter(map(str, devices))
    if len(counts) == 1:
        (name, count), *_ = counts.items()
        number = f"{count}" if least in (None, count) else f"{least} to {count}"
        return f"{number} {name} worker{'s' if count > 1 else ''}"
    listed = ", ".join(n if c == 1 else f"{n} x {c}" for n, c in counts.items())
    return f"{len(devices)} workers on {listed}"


def kinds(groups: Sequence[Group]) -> set[str]:
    """Return the kinds of devices, for GPUs the models: different kinds give different bits."""

    def kind(device: torch.device) -> str:
        if device.type == "cpu":
            return device.type
        name = getattr(torch.get_device_module(device), "get_device_name", None)
        return device.type if name is None else str(name(device))

    return {"+".join(map(kind, group)) for group in groups}


@cache
def device_types() -> tuple[str, ...]:
    """Return the device types available to this process: "cpu", and the accelerator's type."""
    accelerator = torch.accelerator.current_accelerator()
    return ("cpu",) if accelerator is None else ("cpu", accelerator.type)


def current(device: torch.device) -> AbstractContextManager[object]:
    """Make "cuda" without a number mean this device in the current thread, as in a worker."""
    return (
        nullcontext() if device.type == "cpu" else torch.accelerator.device_index(device.index or 0)
    )


def has_streams(device: torch.device) -> bool:
    """Return whether work for a device runs in streams beside the host: on all GPUs except MPS."""
    return device.type != "cpu" and hasattr(torch.get_device_module(device), "Stream")


def has_float64(device: torch.device) -> bool:
    """Return whether a device computes in float64; the host does for all other devices."""
    return device.type != "mps"


def _default_devices(workers: int | None) -> list[Group]:
    # No other accelerator by default: MPS and XPU lack kernels, so the user has to name them.
    if torch.cuda.is_available():
        return _parse("cuda")
    cores = min(usable_cores(), MOST_CPU_WORKERS)
    return [Group([torch.device("cpu")])] * (cores if workers is None else 1)


def _parse(entry: str) -> list[Group]:
    """Return the groups of devices named by one entry of the list."""
    parts = [_named(name.strip()) for name in entry.split("+")]
    if len(parts) == 1:
        return [Group([device]) for device in parts[0]]
    for name, found in zip(entry.split("+"), parts, strict=True):
        if len(found) != 1:
            raise SettingError("devices", entry, "single devices around a +", f"number {name!r}")
    return [Group(device for found in parts for device in found)]


def _named(name: str) -> list[torch.device]:
    known = "cpu, cuda, cuda:N, mps or another device of this torch build"
    torch_name = in_torch(name)
    try:
        device = torch.device(torch_name)
    except RuntimeError:
        kind, colon, index = torch_name.partition(":")
        meant = nearest(kind, KINDS)
        index = f"{colon}{index}" if index.isdecimal() and meant != "cpu" else ""
        fix = "check the spelling" if meant is None else f"did you mean {meant}{index}?"
        if f"{meant}{index}" == torch_name:  # more digits than torch parses
            fix = "name one that exists"
        raise SettingError("devices", name, known, fix) from None
    # Not ``device.index``: torch stores the index in eight bits, so cuda:256 would become cuda:0.
    number = int(torch_name.partition(":")[2] or 0)
    if device.type == "cpu":
        if number:
            raise SettingError("devices", name, "cpu", "there is one CPU; see --workers")
        return [torch.device("cpu")]
    try:
        count = torch.get_device_module(device).device_count()
    except (AttributeError, RuntimeError):
        count = 0
    if count == 0:
        raise SettingError("devices", name, known, _why_none(device.type))
    if ":" not in torch_name:
        return [torch.device(device.type, index) for index in range(count)]
    if number >= count:
        raise SettingError(
            "devices", name, f"{device.type}:0 to {device.type}:{count - 1}", "name one that exists"
        )
    return [device]


def _why_none(kind: str) -> str:
    """Return why torch sees no device of a kind: the most likely cause first."""
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
