"""The devices of a pipelined replica: processes or threads, each with stages of the model."""

from __future__ import annotations

from abc import ABC, abstractmethod

from quorate.engines.stages import beside
from quorate.engines.stages.arrivals import Ends
from quorate.engines.stages.process import Shared
from quorate.replica.beside.values import Values


class Devices(ABC):
    """The devices of a replica at work, and the parent's ends of the links to the devices.

    Args:
        shared: memory of the parent and all devices.
        links: the parent's ends.
        values: of ``Shared``, as the devices have them from the start.
    """

    def __init__(self, shared: Shared, links: Ends, values: Values | None = None) -> None:
        self.links = links
        self._count, self._at_work = shared.devices, shared.at_work
        self._values = values

    def share(self, values: Values | None) -> None:
        """Have the next run read these values of ``Shared``."""
        if values is not None and values is not self._values:
            for number in range(self._count):
                self.links.send(number, "shared", beside.packed(values))
            self._values = values

    def late(self) -> int | None:
        """Return the first stage that computes, for which later stages wait."""
        found = [self._at_work.read(device) for device in range(self._count)]
        return min((stage for stage, computes in found if computes), default=None)

    def ended(self, device: int) -> tuple[int, str]:
        """Return the last stage of a device that is ending, and in words how the device ended."""
        return self._at_work.read(device)[0], "closed its links"

    @abstractmethod
    def close(self) -> bool:
        """End the devices; unfinished work does not count.

        Returns:
            Whether all have ended: a device that has not may still write to shared memory.
        """
