"""The supervisor: runs services beside training, each in a separate thread and on a separate clock.

The same task as TF1's Supervisor. A failing service is reported, and training continues.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

from quorate.machine.limits import BUSY_EXIT_S
from quorate.services import Service
from quorate.services.report import Report


class Services:
    """A context manager that runs services while it is entered.

    Args:
        services: the services, in any order.
        say: shows a line to the user; any thread may call it.
    """

    def __init__(self, services: Sequence[Service], say: Callable[[str], None]) -> None:
        self._say = say
        self._clocks = [_Clock(service, say) for service in services]

    def updated(self, report: Report) -> None:
        """Report an update to all services."""
        for clock in self._clocks:
            clock.guarded(lambda service: service.updated(report))

    def evaluated(self, global_step: int, metrics: dict[str, float]) -> None:
        """Report an evaluation of the validation set to all services."""
        for clock in self._clocks:
            clock.guarded(lambda service: service.evaluated(global_step, metrics))

    def __enter__(self) -> Services:
        for clock in self._clocks:
            clock.begin()
        return self

    def __exit__(self, *_: object) -> None:
        for clock in self._clocks:
            clock.over.set()
        for clock in self._clocks:
            if clock.ident is None:  # no thread could be started for the service
                clock.run()
                continue
            clock.join(BUSY_EXIT_S)
            if clock.is_alive():
                self._say(
                    f"the thread {clock.name} did not stop in {BUSY_EXIT_S:g} s and was abandoned"
                )


class _Clock(threading.Thread):
    """The thread of one service, and the guard against its failures in any thread."""

    def __init__(self, service: Service, say: Callable[[str], None]) -> None:
        super().__init__(name=f"quorate-{service.name}", daemon=True)
        self.over = threading.Event()
        self._service = service
        self._say = say
        self._shown: str | None = None  # the last failure shown

    def begin(self) -> None:
        """Start the thread. If no thread can be started, the service ticks once, at the end."""
        self.guarded(lambda _: self.start())

    def run(self) -> None:
        self.guarded(lambda service: service.tick())
        while not self.over.wait(self._service.every_s):
            self.guarded(lambda service: service.tick())
        self.guarded(lambda service: service.tick())
        self.guarded(lambda service: service.close())

    def guarded(self, work: Callable[[Service], None]) -> None:
        """Run a call of the service; show its failure, unless the previous failure was the same."""
        try:
            work(self._service)
        except Exception as error:  # the edge of a service: training does not depend on it
            failure = (
                f"{self._service.name} failed, training continues: {type(error).__name__}: {error}"
            )
            if failure != self._shown:
                self._say(failure)
            self._shown = failure
