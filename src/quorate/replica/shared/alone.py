"""Isolation of a shard: effects on the thread or process are undone before the next shard."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TypeVar

from quorate.replica.notes import Notes
from quorate.replica.shared import switches
from quorate.replica.turns import Reseed, Turns, leave_alone

T = TypeVar("T")


class ShardTurns:
    """The runner of a replica's shards, one by one or several together. For one thread at a time.

    Args:
        turns: the turns on objects that a process has once.
        notes: messages for the user.
        named: see ``refusals``.
        scripted: see ``as_written``.

    Attributes:
        modes_put_back: returns a context for a shard that restores the thread's modes.
    """

    def __init__(self, turns: Turns, notes: Notes, *, named: bool, scripted: bool) -> None:
        self.turns = turns
        self._notes = notes
        self.modes_put_back = switches.of_a_shard(named=named, scripted=scripted)
        self._modes: switches.ThreadModes | None = None  # inside ``together``

    def run(self, work: Callable[[Reseed], T]) -> T:
        """Run ``work(reseed)``, which computes a shard, possibly repeatedly; see ``Turns.run``."""
        if self._modes is not None:
            try:
                return work(leave_alone)
            finally:
                self._modes.restore()
        result = self.turns.run(partial(self._run, work))
        self.turns.tell(self._notes)
        return result

    def together(self, work: Callable[[], T]) -> tuple[T] | None:
        """Run ``work()``, a computation of several shards by ``run``, checked together.

        Returns:
            The result; None if it does not count: then compute the shards separately.
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
