"""Services: background work beside training, each with a separate thread and clock.

The training loop reports events to a service by calls that must take no time. Slow work, such as
writing to a disk, is done in ``tick``, on the service's thread, and so never delays training.
"""

from __future__ import annotations

from typing import Protocol

from quorate.services.report import Report


class Service(Protocol):
    """The protocol of the services that ``Services`` run beside training."""

    name: str
    every_s: float  # pause between the end of a tick and the start of the next tick

    def updated(self, report: Report) -> None:
        """Note an update. Called by the training loop."""

    def evaluated(self, global_step: int, metrics: dict[str, float]) -> None:
        """Note an evaluation of the validation set. Called by the training loop."""

    def tick(self) -> None:
        """Do the periodic work. Called in the service's own thread; may block.

        Called once at the start, then every ``every_s`` seconds, and once more at the end.
        """

    def close(self) -> None:
        """Free the service's resources. Called in the service's thread, after the last tick."""
