"""Runs of the command ``quorate`` on simulated devices, in forks of a process with devices."""

from collections.abc import Sequence
from functools import cache

from support.accelerator import environment
from support.runs import Ended
from support.warm import Warm

LIMIT_S = 300


@cache
def warm(delays: tuple[float, int, int]) -> Warm:
    """Return the process to fork: with the devices, and without a stream before a fork."""
    return Warm(environment(delays))


class OnDevices:
    """This tree, with the CPUs in options replaced.

    Args:
        devices: the substitute of each CPU, in turn: "sim:0", "sim:1"; none: options stay.
        delays: see ``environment``.
    """

    def __init__(self, *devices: str, delays: tuple[float, int, int] = (0.3, 300, 0)) -> None:
        self._devices = devices
        self._delays = delays

    def run(self, arguments: Sequence[str]) -> Ended:
        """Run the command to the end. Blocks."""
        words = [*arguments]
        for at, word in enumerate(words):
            if word == "--devices" and self._devices:
                words[at + 1] = self._named(words[at + 1])
        return Ended(*warm(self._delays).run(words, environment(self._delays), LIMIT_S))

    def _named(self, value: str) -> str:
        if value == "cpu":  # as many workers as devices, or several on a device
            return ",".join(self._devices)
        names = iter(self._devices * value.count("cpu"))
        parts = value.split("cpu")
        return parts[0] + "".join(next(names) + part for part in parts[1:])
