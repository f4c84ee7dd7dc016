"""Engines: how workers are reached, and which way is taken when nobody says.

processes   one per worker on this machine, over shared memory; each runs the script again
towers      threads of this process
"""

from __future__ import annotations

import os
from collections.abc import Sequence

import torch

from quorate.errors import SettingError
from quorate.transports.processes.script import Script, current

PROCESSES, TOWERS = "processes", "towers"


def chosen(name: str | None, devices: Sequence[torch.device]) -> tuple[str, Script | None]:
    """Return the engine, and for processes the script that they run.

    Worker processes keep parameters in the host's memory and update them there, which suits CPU
    workers; GPUs are towers unless processes are asked for.

    Raises:
        SettingError: there is no such engine, or it cannot work here.
    """
    if name not in (None, PROCESSES, TOWERS):
        raise SettingError("engine", name, f"{PROCESSES} or {TOWERS}", "choose one of them")
    script = current() if os.name == "posix" else None
    if name == PROCESSES and script is None:
        expected = "a script that worker processes can run again"
        fix = "put the program into a file, or use engine='towers'"
        raise SettingError("engine", name, expected, fix)
    several_cpus = len(devices) > 1 and all(device.type == "cpu" for device in devices)
    if script is None or (name is None and not several_cpus) or name == TOWERS:
        return TOWERS, None
    return PROCESSES, script
