"""Both coordinators at once: that of the package, and the plain one that is its judge."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from support.plain import coordinator as plain

from quorate.coordination.coordinator import Coordinator
from quorate.coordination.protocol import Effect, Event


class DifferError(AssertionError):
    """They decided differently."""


class Both(Coordinator):
    """The coordinator of the package, whose every effect is compared with the plain one's.

    Compared are all fields of effects, those too that equality leaves out.
    """

    def __init__(self, **arguments: Any) -> None:
        super().__init__(**arguments)
        tally = arguments.pop("tally", None)
        own = None if tally is None else type(tally)(tally.to_json())
        self._judge = plain.Coordinator(**arguments, tally=own)
        self.compared = 0

    def handle(self, event: Event, now: float, *, rests: bool = False) -> list[Effect]:
        """Take an event, and have the other take it."""
        expected = self._judge.handle(event, now, rests=rests)
        return self._alike(f"{event} at {now}", super().handle(event, now, rests=rests), expected)

    def _alike(self, what: str, found: list[Effect], expected: list[Effect]) -> list[Effect]:
        self.compared += len(expected)
        if [(type(e), asdict(e)) for e in found] != [(type(e), asdict(e)) for e in expected]:
            raise DifferError(f"{what}:\n  {found}\nand not\n  {expected}")
        if (self.left_open, self.applied) != (self._judge.left_open, self._judge.applied):
            raise DifferError(f"{what}: {self.left_open} are open, not {self._judge.left_open}")
        if self.tally.to_json() != self._judge.tally.to_json():
            raise DifferError(f"{what}: the tally is {self.tally.to_json()}")
        return found
