"""The supervisor: a service that fails is said once, and goes on being tried."""

from __future__ import annotations

import threading

from quorate.services.report import Report
from quorate.services.supervisor import Supervisor


class Counting:
    """A service that notes what it is told, and fails on demand."""

    name = "counting"
    every_s = 0.05

    def __init__(self, *, fails: bool) -> None:
        self.fails = fails
        self.ticks, self.updates, self.closed = 0, 0, False
        self.often = threading.Event()  # set at the fourth tick

    def updated(self, report: Report) -> None:
        self.updates += 1

    def evaluated(self, global_step: int, metrics: dict[str, float]) -> None:
        pass

    def tick(self) -> None:
        self.ticks += 1
        if self.ticks == 4:
            self.often.set()
        assert threading.current_thread().name == "quorate-counting"
        if self.fails:
            raise ValueError("it cannot")

    def close(self) -> None:
        self.closed = True


def test_a_service_that_fails_is_said_once_and_goes_on_being_tried() -> None:
    said: list[str] = []
    fine, failing = Counting(fails=False), Counting(fails=True)
    with Supervisor([fine, failing], said.append):
        assert fine.often.wait(60)
        assert failing.often.wait(60)
    assert said == ["counting failed, training continues: ValueError: it cannot"]
    assert fine.closed
    assert failing.closed
