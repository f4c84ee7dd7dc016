"""Turns on what a process has once: Python's, NumPy's and torch's generator, and its switches.

Python's ``random`` and NumPy's legacy functions cannot be given to a thread, as torch's generator
can (``Stream``), nor can a default dtype. ``Turns`` notices code that uses such things, so that
such code, and only such code, takes turns.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import NamedTuple, TypeVar

from quorate.coordination.keys import Seed
from quorate.replica.notes import Notes
from quorate.replica.shared import generators, switches

T = TypeVar("T")

# The thread that computes has a stream of its own.
RACE = (
    "the model starts threads that draw from torch's default generator, and the order of the draws "
    "depends on timing; draw the numbers before the threads start, and pass the numbers in"
)
Reseed = Callable[[Seed], None]


class Turns:
    """Lets code that uses what a process has once do so repeatably, whatever other threads do.

    That is to draw from shared generators (Python's ``random``, NumPy's legacy functions, torch's
    own in a thread without a ``Stream``), or to leave a switch in another place. One ``Turns``
    watches one kind of code: a model, a dataset. Code that does nothing of the kind is left alone.
    Once it is seen to, it is run again, and from then on always, with a seed of its own and while
    nobody else has a turn.

    Args:
        side_by_side: whether code that did nothing of the kind in its first run goes on outside of
            turns. It is looked at around each run; if anything changed meanwhile, whoever did it,
            the run does not count and is made once more, alone.
    """

    def __init__(self, *, side_by_side: bool = False) -> None:
        self.draws = False  # whether it runs in turns, with seeds, from now on
        self.reasons: list[str] = []  # why, where more is known than that it was seen to draw
        self.race: str | None = None  # why turns do not help
        self._side_by_side = side_by_side
        # Where its code names a shared generator, if it does. Beside other code that draws in turns
        # it could not be seen to draw.
        self.may_draw: str | None = None
        self._first = True
        self._is_said = False
        self._beside = _Beside() if side_by_side else None

    def require(self, reason: str) -> None:
        """Take turns from now on: code is known to use what a process has once."""
        self.draws = True
        if reason not in self.reasons:
            self.reasons.append(reason)

    def news(self) -> str | None:
        """Return that code takes turns now, and why; None if that was said."""
        if not self.draws or self._is_said:  # asked after every shard
            return None
        self._is_said = True
        if self.reasons:
            return f"workers compute one at a time, because {'; '.join(self.reasons)}"
        return (
            "the model draws from Python's random or NumPy, whose generators all threads share, so "
            "workers compute one at a time; draw with torch's functions to compute in parallel"
        )

    def tell(self, notes: Notes) -> None:
        """Note that code takes turns, and where that does not help."""
        if (line := self.news()) is not None:
            notes.add(line)
        if self.race is not None:
            notes.doubt(self.race)

    def run(self, work: Callable[[Reseed], T]) -> T:
        """Run ``work(reseed)``, which must give the same result when it is run again.

        ``reseed`` takes a 64-bit key and does nothing as long as nothing is drawn. The states of
        the generators are afterwards what they were before.
        """
        if self.may_draw is not None and not self.draws and _turn.drawers:
            self.require(f"{self.may_draw} may draw from a generator that loading rows draws from")
        beside = self.together(partial(work, leave_alone))
        if beside is not None:
            return beside[0]
        nobody = nullcontext() if self._beside is None else self._beside.held_up()
        with _turn.lock, nobody:
            if self._beside is not None and self._beside.stand is not None:
                switches.restore(self._beside.stand)
            # A first run is a turn already: other code must not take its draws for its own.
            with _turn.taken() if self._first else nullcontext():
                return self._alone(work)

    def together(self, work: Callable[[], T]) -> tuple[T] | None:
        """Run ``work()`` outside of turns, and return its result.

        None: that cannot be, or somebody drew or set something meanwhile, and it does not count.
        """
        if self._beside is None or self._first or self.draws:
            return None
        with self._beside as seen:
            before = seen or _turn.look()
            result = work()
            after = _turn.look()
        # What another thread has found out meanwhile holds for this run too.
        return (result,) if before == after and not self.draws else None

    def _alone(self, work: Callable[[Reseed], T]) -> T:
        states, stand = _turn.states(), switches.settings()
        if not self.draws:
            mark, drawn = generators.mark(), generators.torch_mark()
            result = work(leave_alone)
            names = switches.changed(stand, switches.settings())
            was_first, self._first = self._first, False
            if generators.mark() == mark and not names:
                return result
            if not was_first:
                _turn.disturbed += 1  # who runs beside it cannot see who did it
            if generators.torch_mark() != drawn:
                self.race = RACE
            self.draws = True
            _turn.drawers += 1
            self.reasons += [f"a shard changes {name} and does not restore it" for name in names]
        self._first = False
        with _turn.taken():
            try:
                switches.restore(stand)
                return work(generators.reseed)
            finally:  # within the turn: after its end other threads read the generators' positions
                generators.restore(states)
                switches.restore(stand)


class _Beside:
    """Runs outside of turns that are under way; within ``held_up`` there are none."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        self._runs = 0
        self._held_up = 0
        self.stand: switches.Settings | None = None  # of the switches, when there was no run yet

    def __enter__(self) -> _Seen | None:
        """Return what was seen as it began, if no other run was under way."""
        seen = None
        with self._lock:
            while self._held_up:
                self._changed.wait()
            if not self._runs:
                seen = _turn.look()
                self.stand = seen.switches
            self._runs += 1
        return seen

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._runs -= 1
            if self._held_up:
                self._changed.notify_all()

    @contextmanager
    def held_up(self) -> Iterator[None]:
        with self._changed:
            self._held_up += 1
            while self._runs:
                self._changed.wait()
        try:
            yield
        finally:
            with self._changed:
                self.stand = None
                self._held_up -= 1
                self._changed.notify_all()


class _Seen(NamedTuple):
    """What a process has once, as it was at some moment."""

    drawn: generators.Mark
    switches: switches.Settings
    disturbed: int


class _Turn:
    """The turn on what a process has once: there is one, as there is one of each of them."""

    def __init__(self) -> None:
        self._reset()
        # A fork may come while another thread has its turn, which then never ends in the child.
        os.register_at_fork(after_in_child=self._reset)

    def _reset(self) -> None:
        self.lock = threading.RLock()
        self.disturbed = 0  # runs that changed something outside of a turn, so far
        self.drawers = 0  # kinds of code that were seen to draw
        self._begun = 0  # turns so far
        self._active = 0  # of these, not yet ended: they may be within each other
        # When the first of these began.
        self._at_rest: tuple[generators.Mark, switches.Settings] = ((), ())
        self._known: tuple[generators.Mark, generators.States] | None = None

    def look(self) -> _Seen:
        """Return what differs if somebody who has no turn drew or set something in between."""
        while True:
            begun = self._begun
            found = self._at_rest if self._active else (generators.mark(), switches.settings())
            if self._begun == begun:  # else a turn began meanwhile
                return _Seen(*found, self.disturbed)

    def shared_mark(self) -> generators.Mark:
        """Return what differs if somebody who has no turn drew from Python's or NumPy's."""
        while True:
            begun = self._begun
            found = self._at_rest[0][:-1] if self._active else generators.shared_mark()
            if self._begun == begun:
                return found

    @contextmanager
    def taken(self) -> Iterator[None]:
        """Have the turn within the block; the lock must be held."""
        if not self._active:
            self._at_rest = (generators.mark(), switches.settings())
        self._active += 1  # first: ``look`` of another thread may come between these two lines
        self._begun += 1
        try:
            yield
        finally:
            self._active -= 1

    def states(self) -> generators.States:
        """Return the states of the generators; the lock must be held."""
        mark = generators.mark()
        if self._known is None or self._known[0] != mark:
            self._known = mark, generators.states()
        return self._known[1]


_turn = _Turn()


def drawn_outside() -> object:
    """Return what differs if code that has no turn drew from Python's or NumPy's generator."""
    return _turn.shared_mark()


def disturbances() -> int:
    """Return how many runs, so far, drew outside of a turn: each was found out, and made again."""
    return _turn.disturbed


def leave_alone(_seed: Seed) -> None:
    """Seed nothing: nobody draws from what a process has once."""
