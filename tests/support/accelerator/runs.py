"""Runs of the command ``quorate`` on simulated devices, each in a process of its own."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence

from support.accelerator import environment
from support.runs import Ended

LIMIT_S = 300


class OnDevices:
    """This tree, with the CPUs in options replaced.

    Args:
        devices: what takes the place of each CPU, in turn: "sim:0", "sim:1"; none: options stay.
        delays: see ``environment``.
    """

    def __init__(self, *devices: str, delays: tuple[float, int, int] = (0.3, 300, 0)) -> None:
        self._devices = devices
        self._env = environment(delays)

    def run(self, arguments: Sequence[str]) -> Ended:
        """Run the command to its end. Blocks."""
        words = [*arguments]
        for at, word in enumerate(words):
            if word == "--devices" and self._devices:
                words[at + 1] = self._named(words[at + 1])
        ended = subprocess.run(
            [sys.executable, "-m", "quorate", *words],
            env=self._env,
            capture_output=True,
            text=True,
            timeout=LIMIT_S,
            check=False,
        )
        return Ended(ended.returncode, ended.stdout, ended.stderr, [])

    def _named(self, value: str) -> str:
        if value == "cpu":  # as many workers as there are, or several on one
            return ",".join(self._devices)
        names = iter(self._devices * value.count("cpu"))
        parts = value.split("cpu")
        return parts[0] + "".join(next(names) + part for part in parts[1:])
