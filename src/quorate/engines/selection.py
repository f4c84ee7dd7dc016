"""Engines: how workers are reached, and which way is taken when nobody says.

processes   one per worker on this machine, over shared memory; each runs the script again
towers      threads of this process
collective  one process per worker, each with the parameters, on any number of hosts; torchrun
            starts them, or the first of them the others of its machine
ray         processes on the nodes of a Ray cluster, which run the script again
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

OF_PROCESSES = (PROCESSES, RAY)  # workers are processes, and the coordinator has a host's memory


class Chosen(NamedTuple):
    """An engine, and why it is that one."""

    name: str
    script: Script | None  # that worker processes run
    why: str | None = None  # where it is not the usual one


def chosen(name: str | None, devices: Sequence[torch.device]) -> Chosen:
    """Return the engine.

    Worker processes keep parameters in the host's memory and update them there, which suits CPU
    workers; GPUs are towers unless processes are asked for.

    Raises:
        SettingError: there is no such engine, or it cannot work here.
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
            return Chosen(COLLECTIVE, None)
    if name == COLLECTIVE and script is not None:
        return Chosen(COLLECTIVE, script)
    if name in (PROCESSES, COLLECTIVE, RAY) and script is None:
        expected = "a script that worker processes can run again"
        fix = "put the program into a file, or use engine='towers'"
        raise SettingError("engine", name, expected, fix)
    if name == RAY:
        return Chosen(RAY, script)
    several_cpus = len(devices) > 1 and all(device.type == "cpu" for device in devices)
    if script is None or (name is None and not several_cpus) or name == TOWERS:
        return Chosen(TOWERS, None)
    return Chosen(PROCESSES, script)


def require_ray() -> None:
    """Raise if Ray is not installed: it is an extra.

    Raises:
        SettingError: it is not.
    """
    if find_spec("ray") is None:
        fix = 'pip install "quorate-torch[ray]"'
        raise SettingError("engine", RAY, "an engine that is installed", fix)


def suited(name: str | None, engine: Chosen, obstacle: str) -> Chosen:
    """Return the engine for a model that towers cannot have copies of.

    Args:
        name: what was asked for.
        engine: what was chosen without that.
        obstacle: why not.

    Raises:
        CopyError: towers were asked for, or there is no other way.
    """
    if engine.name in (*OF_PROCESSES, COLLECTIVE):
        return engine
    script = current() if os.name == "posix" else None
    if name == TOWERS:
        raise refused(obstacle, FIX)
    if script is None:
        raise refused(obstacle, f"put the program into a file: {FIX}")
    return Chosen(
        PROCESSES,
        script,
        f"workers are processes, because towers (threads) need copies: {obstacle}",
    )
