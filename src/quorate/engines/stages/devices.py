"""What a pipelined replica has of its devices: processes or threads, by the same few words."""

from __future__ import annotations

from typing import Protocol

from quorate.engines.stages.arrivals import Ends
from quorate.replica.beside.values import Values


class Devices(Protocol):
    """The devices of a replica, at work, and the parent's ends of their links."""

    @property
    def links(self) -> Ends:
        """The parent's ends."""

    def share(self, values: Values | None) -> None:
        """Have the next run read these values of ``Shared``."""

    def late(self) -> int | None:
        """Return a stage that others wait for."""

    def ended(self, device: int) -> tuple[int, str]:
        """Return at which stage a device was that is ending, and how it ended, in words."""

    def close(self) -> bool:
        """End them; return whether all have ended."""
