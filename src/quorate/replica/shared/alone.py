"""A shard is computed alone: what it leaves behind in its thread or process reaches no other."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from typing import TypeVar

from quorate.replica.notes import Notes
from quorate.replica.shared import switches
from quorate.replica.turns import Reseed, Turns, leave_alone

T = TypeVar("T")


class Alone:
    """Runs the shards of one replica, one by one or several together. One thread at a time.

    Args:
        turns: on what the process has once.
        notes: for the user.
        named: see ``refusals``.
        scripted: see ``as_written``.
    """

    def __init__(self, turns: Turns, notes: Notes, *, named: bool, scripted: bool) -> None:
        self.turns = turns
        self._notes = notes
        self._named, self._scripted = named, scripted
        self._modes: switches.ThreadModes | None = None  # within ``together``

    def run(self, work: Callable[[Reseed], T]) -> T:
        """Run ``work(reseed)``, which computes a shard, maybe more than once; see ``Turns.run``."""
        if self._modes is not None:
            try:
                return work(leave_alone)
            finally:
                self._modes.restore()
        result = self.turns.run(partial(self._run, work))
        self.turns.tell(self._notes)
        return result

    def together(self, work: Callable[[], T]) -> tuple[T] | None:
        """Run ``work()``, which computes several shards by ``run``; they are looked at as one.

        Returns:
            Its result; None if that does not count: compute them one by one.
        """
        with self.modes_put_back():
            self._modes = switches.ThreadModes()
            try:
                return self.turns.together(work)
            finally:
                self._modes = None

    def _run(self, work: Callable[[Reseed], T], reseed: Reseed) -> T:
        with self.modes_put_back():
            return work(reseed)

    def modes_put_back(self) -> AbstractContextManager[object]:
        """Return a block in which a shard is computed, whatever it does to the thread's modes."""
        return switches.of_a_shard(named=self._named, scripted=self._scripted)
