"""The run that is to be judged: which accelerators it would use, and how many workers."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import NamedTuple

from quorate.commands.doctor.facts import Accelerator, Facts
from quorate.machine.device_names import in_torch
from quorate.machine.resources import MOST_CPU_WORKERS


class Wanted(NamedTuple):
    """The run that is to be judged; what is None is chosen as ``quorate run`` does."""

    devices: tuple[str, ...] | None = None
    workers: int | None = None
    threads: int = 1


def named_devices(text: str) -> tuple[str, ...]:
    """Return torch's names of the devices in a list as ``--devices`` takes it."""
    return tuple(in_torch(name.strip()) for name in re.split(r"[,+]", text))


def accelerators(facts: Facts, wanted: Wanted) -> list[Accelerator]:
    """Return the accelerators that the run would use; none: it would use the CPU."""
    names = wanted.devices
    if names is None:  # as ``quorate.machine.devices`` chooses
        return [a for a in facts.accelerators if a.device.startswith("cuda")]
    return [
        a for a in facts.accelerators if a.device in names or a.device.partition(":")[0] in names
    ]


def number_of_workers(facts: Facts, wanted: Wanted, chosen: Sequence[Accelerator]) -> int:
    """Return how many workers the run would have."""
    if wanted.workers is not None:
        return wanted.workers
    if wanted.devices is not None:
        return max(1, len(chosen) + wanted.devices.count("cpu"))
    return len(chosen) or cpu_workers(facts)


def cpu_workers(facts: Facts) -> int:
    """Return how many CPU workers a run starts by itself."""
    return max(1, min(int(facts.host.cores_usable), MOST_CPU_WORKERS))
