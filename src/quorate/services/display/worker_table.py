"""The table of workers as a service: reads the state of the workers every few seconds."""

from __future__ import annotations

import time
from collections.abc import Callable

from quorate.engines.worker_status import WorkerStatus
from quorate.services.device_use import DeviceGauges
from quorate.services.display.display import Display
from quorate.services.display.straggler import SlowWorkers
from quorate.services.report import Report


class WorkerTable:
    """The service that shows the workers and their devices on the display.

    Args:
        screen: the display.
        status: returns the current status of all workers.
        slow_workers: compares the times of workers.
        tell: receives, in the service's thread, the lines of ``slow_workers``, for the log.
    """

    name = "worker table"
    every_s = 2.0

    def __init__(
        self,
        screen: Display,
        status: Callable[[], list[WorkerStatus]],
        slow_workers: SlowWorkers,
        tell: Callable[[str], None] = lambda _: None,
    ) -> None:
        self._screen = screen
        self._status = status
        self._slow_workers = slow_workers
        self._gauges = DeviceGauges()
        self._tell = tell

    def updated(self, report: Report) -> None:
        """Do nothing: the table is not about updates."""

    def evaluated(self, global_step: int, metrics: dict[str, float]) -> None:
        """Do nothing: the table is not about metrics."""

    def tick(self) -> None:
        """Show the current state of the workers."""
        workers = self._status()
        uses, _ = self._gauges.read(workers)
        self._screen.workers(workers, uses)
        for line in self._slow_workers.named(workers, time.monotonic()):
            self._tell(line)

    def close(self) -> None:
        """Close the gauges."""
        self._gauges.close()
