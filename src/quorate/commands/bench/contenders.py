"""Contenders: the configurations compared by a bench, and the order of their runs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from quorate.errors import SettingError
from quorate.machine.devices import worker_devices


class Contender(NamedTuple):
    """A number of workers on some devices."""

    devices: str | None  # as typed; None: the script's own
    workers: int  # number of workers

    def label(self) -> str:
        """Return a name: ``2 workers on cuda``."""
        on = "" if self.devices is None else f" on {self.devices}"
        return f"{self.workers} worker{'s' if self.workers > 1 else ''}{on}"


def contenders(devices: Sequence[str], workers: Sequence[int]) -> list[Contender]:
    """Return the requested contenders in order, without duplicates; checked on this machine.

    Args:
        devices: lists of devices in the syntax of ``--devices``; empty: the script's own.
        workers: numbers of workers, each for each list; empty: one worker per device of each list,
            or without a list one worker, then twice as many repeatedly, up to all devices.

    Raises:
        SettingError: a device is missing, or a number of workers is zero.
    """
    compared: list[Contender] = []
    lists: Sequence[str | None] = devices or [None]
    for listed in lists:
        counts = workers or [len(worker_devices(listed, None))]
        if not devices and not workers:
            counts = _doubled(counts[0])
        compared += [Contender(listed, len(worker_devices(listed, count))) for count in counts]
    return list(dict.fromkeys(compared))


def rounds(compared: Sequence[Contender], repeats: int) -> list[list[Contender]]:
    """Return the runs of each round, in alternating order, so that drift affects all alike.

    The contender with the most workers is the first: if the script leaves the number of shards
    open, the first run has as many shards as workers, and all later runs get the same number.
    """
    order = sorted(compared, key=lambda contender: -contender.workers)
    return [order if number % 2 == 0 else order[::-1] for number in range(repeats)]


def counts(text: str) -> list[int]:
    """Return numbers of workers from a text like ``1,2,4``.

    Raises:
        SettingError: the text is not a list of numbers.
    """
    try:
        numbers = [int(word) for word in text.split(",")]
    except ValueError:
        numbers = []
    if not numbers or min(numbers) < 1:
        raise SettingError("workers", text, "numbers of workers such as 1,2,4", "list them")
    return numbers


def _doubled(most: int) -> list[int]:
    numbers = [1]
    while numbers[-1] * 2 < most:
        numbers.append(numbers[-1] * 2)
    return sorted({*numbers, most})
