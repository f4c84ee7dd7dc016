"""Turns on the single objects of a process: Python's, NumPy's and torch's generator, and switches.

Unlike torch's generator (``Stream``), Python's ``random`` and NumPy's legacy functions cannot be
replaced per thread, and neither can a default dtype. ``Turns`` detects code with uses of such
objects, and only this code takes turns.
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

# The computing thread has a stream of its own.
RACE = (
    "the model starts threads that draw from torch's default generator, and the order of the draws "
    "depends on timing; draw the numbers before the threads start, and pass the numbers in"
)
Reseed = Callable[[Seed], None]


class Turns:
    """Repeatable use of objects that a process has once, independent of concurrent threads.

    Uses are draws from shared generators (Python's ``random``, NumPy's legacy functions, torch's
    own in a thread without a ``Stream``), and switches left in a new position. A ``Turns`` object
    watches a single kind of code: a model, a dataset. Code without such uses is left alone. Code
    with such a use is run again, and from then on always in a turn, with a seed of its own and
    exclusively.

    Args:
        side_by_side: whether code without such uses in its first run goes on outside of turns. Each
            run is then checked; if any thread changed a generator or switch meanwhile, the run does
            not count and is repeated alone.
    """

    def __init__(self, *, side_by_side: bool = False) -> None:
        self.draws = False  # whether the code runs in turns, with seeds, from now on
        self.reasons: list[str] = []  # why, if more is known than a draw
        self.race: str | None = None  # why turns do not help
        self._side_by_side = side_by_side
        # The place where the code names a shared generator, if any. Beside the draws of further
        # code in turns, its own could not be detected.
        self.may_draw: str | None = None
        self._first = True
        self._is_said = False
        self._beside = _OutsideRuns() if side_by_side else None

    def require(self, reason: str) -> None:
        """Take turns from now on: the code is known to use objects that a process has once."""
        self.draws = True
        if reason not in self.reasons:
            self.reasons.append(reason)

    def news(self) -> str | None:
        """Return a line that code takes turns now, and why; None if already reported."""
        if not self.draws or self._is_said:  # called after every shard
            return None
        self._is_said = True
        if self.reasons:
            return f"workers compute one at a time, because {'; '.join(self.reasons)}"
        return (
            "the model draws from Python's random or NumPy, whose generators all threads share, so "
            "workers compute one at a time; draw with torch's functions to compute in parallel"
        )

    def tell(self, notes: Notes) -> None:
        """Report that the code takes turns, and any race that remains."""
        if (line := self.news()) is not None:
            notes.add(line)
        if self.race is not None:
            notes.doubt(self.race)

    def run(self, work: Callable[[Reseed], T]) -> T:
        """Run ``work(reseed)``, which must give the same result when repeated.

        ``reseed`` takes a 64-bit key and has no effect as long as nothing is drawn. The states of
        the generators are restored afterwards.
        """
        if self.may_draw is not None and not self.draws and _turn.drawers:
            self.require(f"{self.may_draw} may draw from a generator that loading rows draws from")
        beside = self.together(partial(work, leave_alone))
        if beside is not None:
            return beside[0]
        with self._exclusive():
            if self._beside is not None and self._beside.stand is not None:
                switches.restore(self._beside.stand)
            # A first run is a turn already: its draws must not be attributed to further code.
            with _turn.taken() if self._first else nullcontext():
                return self._alone(work)

    def together(self, work: Callable[[], T]) -> tuple[T] | None:
        """Run ``work()`` outside of turns, and return its result.

        None: the code needs turns, or a generator or switch changed meanwhile, so the result does
        not count.
        """
        if self._beside is None or self._first or self.draws:
            return None
        with self._beside as seen:
            before = seen or _turn.look()
            result = work()
            after = _turn.look()
        # A use detected by another thread meanwhile counts for this run too.
        return (result,) if before == after and not self.draws else None

    @contextmanager
    def held(self) -> Iterator[None]:
        """Hold the turn within the block, if the code takes turns: no other shard runs meanwhile.

        Rows have to be loaded before: the loader may have to wait for the turn.
        """
        with self._exclusive() if self.draws else nullcontext():
            yield

    @contextmanager
    def _exclusive(self) -> Iterator[None]:
        with _turn.lock, nullcontext() if self._beside is None else self._beside.held_up():
            yield

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
                _turn.disturbed += 1  # runs beside it cannot know which code did it
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
            finally:  # within the turn: afterwards, threads read the generators' positions
                generators.restore(states)
                switches.restore(stand)


class _OutsideRuns:
    """The runs outside of turns in progress; inside ``held_up`` there are none."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        self._runs = 0
        self._held_up = 0
        self.stand: switches.Settings | None = None  # of the switches, before the first run

    def __enter__(self) -> _ProcessState | None:
        """Return the observation at the beginning, if no other run was in progress."""
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


class _ProcessState(NamedTuple):
    """An observation of the objects that a process has once."""

    drawn: generators.Mark
    switches: switches.Settings
    disturbed: int


class _ProcessTurn:
    """The turn on objects that a process has once: a single object, like them."""

    def __init__(self) -> None:
        self._reset()
        # A fork may happen during another thread's turn, which then never ends in the child.
        os.register_at_fork(after_in_child=self._reset)

    def _reset(self) -> None:
        self.lock = threading.RLock()
        self.disturbed = 0  # runs so far that changed an object outside of a turn
        self.drawers = 0  # kinds of code that were seen to draw
        self._begun = 0  # turns so far
        self._active = 0  # turns in progress: they may be nested
        # The observation when the outermost of them began.
        self._at_rest: tuple[generators.Mark, switches.Settings] = ((), ())
        self._known: tuple[generators.Mark, generators.GeneratorStates] | None = None

    def look(self) -> _ProcessState:
        """Return an observation that changes with draws and switches outside of turns."""
        while True:
            begun = self._begun
            found = self._at_rest if self._active else (generators.mark(), switches.settings())
            if self._begun == begun:  # otherwise a turn began meanwhile
                return _ProcessState(*found, self.disturbed)

    def shared_mark(self) -> generators.Mark:
        """Return a mark that changes with draws from Python or NumPy generators without a turn."""
        while True:
            begun = self._begun
            found = self._at_rest[0][:-1] if self._active else generators.shared_mark()
            if self._begun == begun:
                return found

    @contextmanager
    def taken(self) -> Iterator[None]:
        """Have the turn inside the block; the lock must be held."""
        if not self._active:
            self._at_rest = (generators.mark(), switches.settings())
        self._active += 1  # first: another thread's ``look`` may come between these two lines
        self._begun += 1
        try:
            yield
        finally:
            self._active -= 1

    def states(self) -> generators.GeneratorStates:
        """Return the states of the generators; the lock must be held."""
        mark = generators.mark()
        if self._known is None or self._known[0] != mark:
            self._known = mark, generators.states()
        return self._known[1]


_turn = _ProcessTurn()


def drawn_outside() -> object:
    """Return a mark that changes with draws from Python's or NumPy's generator outside of turns."""
    return _turn.shared_mark()


def disturbances() -> int:
    """Return the number of runs with draws outside of turns: each was detected and repeated."""
    return _turn.disturbed


def leave_alone(_seed: Seed) -> None:
    """Seed nothing, for code that uses no objects of the process."""
