"""Services run beside training and never in its way; this is what all of them have.

A service has a thread and a clock of its own. The loop tells it what happens, which must take no
time; what takes time it does in ``tick``.
"""

from __future__ import annotations

from typing import Protocol

from quorate.services.report import Report


class Service(Protocol):
    """What a supervisor runs beside training."""

    name: str
    every_s: float  # between the ends of two ticks and the next

    def updated(self, report: Report) -> None:
        """Take note of an update. Called in the loop."""

    def evaluated(self, global_step: int, metrics: dict[str, float]) -> None:
        """Take note of an evaluation of the validation set. Called in the loop."""

    def tick(self) -> None:
        """Do what is to be done now and then. Called in the service's own thread; it may block.

        Once at the start, then every ``every_s`` seconds, and once more at the end.
        """

    def close(self) -> None:
        """Free what it holds. Called in its own thread, after the last tick."""
