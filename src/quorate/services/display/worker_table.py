"""The service that shows what each worker does: its time, its device, who is slow."""

from __future__ import annotations

from collections.abc import Callable

from quorate.services.device_use import Gauges
from quorate.services.display.display import Display
from quorate.services.report import Report
from quorate.transports.worker_status import WorkerStatus


class WorkerTable:
    """A ``Service``.

    Args:
        screen: where it is shown.
        status: of all workers, at the moment.
        gauges: of their devices; closed with this.
    """

    name = "worker table"
    every_s = 2.0

    def __init__(
        self, screen: Display, status: Callable[[], list[WorkerStatus]], gauges: Gauges
    ) -> None:
        self._screen = screen
        self._status = status
        self._gauges = gauges

    def updated(self, report: Report) -> None:
        pass

    def evaluated(self, global_step: int, metrics: dict[str, float]) -> None:
        pass

    def tick(self) -> None:
        workers = self._status()
        uses, _ = self._gauges.read(workers)
        self._screen.workers(workers, uses)

    def close(self) -> None:
        self._gauges.close()
