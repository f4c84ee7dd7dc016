"""The planned run to judge: the accelerators in use, and the number of workers."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import NamedTuple

from quorate.commands.doctor.facts import Accelerator, Facts
from quorate.machine.device_names import in_torch
from quorate.machine.resources import MOST_CPU_WORKERS


class Wanted(NamedTuple):
    """The planned run to judge; a None is replaced by the default of ``quorate run``."""

    devices: tuple[str, ...] | None = None
    workers: int | None = None
    threads: int = 1


def named_devices(text: str) -> tuple[str, ...]:
    """Return torch's names of the devices in a list with the syntax of ``--devices``."""
    return tuple(in_torch(name.strip()) for name in re.split(r"[,+]", text))


def accelerators(facts: Facts, wanted: Wanted) -> list[Accelerator]:
    """Return the accelerators of the planned run; empty: the run would use the CPU."""
    names = wanted.devices
    if names is None:  # the default of ``quorate.machine.devices``
        return [a for a in facts.accelerators if a.device.startswith("cuda")]
    return [
        a for a in facts.accelerators if a.device in names or a.device.partition(":")[0] in names
    ]


def number_of_workers(facts: Facts, wanted: Wanted, chosen: Sequence[Accelerator]) -> int:
    """Return the number of workers of the planned run."""
    if wanted.workers is not None:
        return wanted.workers
    if wanted.devices is not None:
        return max(1, len(chosen) + wanted.devices.count("cpu"))
    return len(chosen) or cpu_workers(facts)


def cpu_workers(facts: Facts) -> int:
    """Return the default number of CPU workers of a run."""
    return max(1, min(int(facts.host.cores_usable), MOST_CPU_WORKERS))
