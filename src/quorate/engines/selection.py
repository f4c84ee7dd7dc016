"""The selection of an engine, by name or by default.

processes   a process per worker on this machine, with shared memory; each runs the script again
towers      a thread of this process per worker
collective  a rank per worker, each with all parameters, on any number of hosts; torchrun starts all
            ranks, or the first rank starts the ranks of its machine
ray         processes on the nodes of a Ray cluster, each runs the script again
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from importlib.util import find_spec
from typing import NamedTuple

import torch

from quorate.engines.collective.rank_place import own_place
from quorate.engines.processes.script import Script, current
from quorate.errors import SettingError, cure
from quorate.replica.shared.copies import FIX, refused

PROCESSES, TOWERS, COLLECTIVE, RAY = "processes", "towers", "collective", "ray"

OF_PROCESSES = (PROCESSES, RAY)  # workers are processes; the coordinator's state is on the CPU


class EngineChoice(NamedTuple):
    """An engine, and the reason for an unusual choice."""

    name: str
    script: Script | None  # run by worker processes
    why: str | None = None  # None: the usual choice


def chosen(name: str | None, devices: Sequence[torch.device]) -> EngineChoice:
    """Return the engine with a name, or the default engine for some devices.

    The default for several CPUs is processes: parameters are updated in memory of the host, near
    CPU workers. The default for GPUs is towers.

    Raises:
        SettingError: the name is unknown, or the engine cannot work in this process.
    """
    known = (PROCESSES, TOWERS, COLLECTIVE, RAY)
    if name is not None and name not in known:
        expected = f"{', '.join(known[:-1])} or {known[-1]}"
        raise SettingError("engine", name, expected, cure(name, known))
    if name == RAY:
        require_ray()
    script = current() if os.name == "posix" else None
    if (place := own_place()) is not None:
        if name not in (None, COLLECTIVE) and place.size > 1:
            expected = f"{COLLECTIVE}, as torchrun has started {place.size} ranks"
            fix = "leave it out; or start the script without torchrun"
            raise SettingError("engine", name, expected, fix)
        if name in (None, COLLECTIVE):
            return EngineChoice(COLLECTIVE, None)
    if name in (PROCESSES, COLLECTIVE, RAY):
        if script is None:
            expected = "a script that worker processes can run again"
            fix = "put the program into a file, or use engine='towers'"
            raise SettingError("engine", name, expected, fix)
        return EngineChoice(name, script)
    several_cpus = len(devices) > 1 and all(device.type == "cpu" for device in devices)
    if script is None or name == TOWERS or not several_cpus:
        return EngineChoice(TOWERS, None)
    return EngineChoice(PROCESSES, script)


def require_ray() -> None:
    """Raise an error without an installed Ray, an extra of the distribution.

    Raises:
        SettingError: Ray is not installed.
    """
    if find_spec("ray") is None:
        fix = 'pip install "quorate-torch[ray]"'
        raise SettingError("engine", RAY, "an engine that is installed", fix)


def suited(name: str | None, engine: EngineChoice, obstacle: str) -> EngineChoice:
    """Return the engine for a model without copies, as towers need.

    Args:
        name: the requested engine.
        engine: the choice for a model with copies.
        obstacle: the reason against copies, in words.

    Raises:
        CopyError: towers were requested, or no further engine can work.
    """
    if engine.name in (*OF_PROCESSES, COLLECTIVE):
        return engine
    script = current() if os.name == "posix" else None
    if name == TOWERS:
        raise refused(obstacle, FIX)
    if script is None:
        raise refused(obstacle, f"put the program into a file: {FIX}")
    return EngineChoice(
        PROCESSES,
        script,
        f"workers are processes, because towers (threads) need copies: {obstacle}",
    )
