"""Notes of replicas to the user: each is said once, whichever workers come upon it.

A note may have several lines. The first one says what it is about: with another one of the same
first line nothing more is said. A note that is a doubt says why a run may not have the bits that
another number of workers gives; it is kept with the run. A note that questions the values says why
the run trains something else than its script means, with the same bits on any number of workers.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable
from typing import NamedTuple


class Note(NamedTuple):
    """Something that the user is told once."""

    text: str
    is_doubt: bool  # whether it is a reason why the run may not have the bits it ought to
    questions_values: bool = False  # whether it is a reason why the values may not be those meant

    def __str__(self) -> str:
        if self.questions_values:
            return f"values in doubt: {self.text}"
        return f"same bits: no, because {self.text}" if self.is_doubt else self.text


class Notes:
    """Notes that wait to be said, and all doubts so far. Any thread may add one."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._known: set[str] = set()
        self._new: list[Note] = []
        self._doubts: list[str] = []
        self._unreported: list[str] = []

    @property
    def doubts(self) -> list[str]:
        """Return why the run may not have the bits it ought to: first lines, the oldest first."""
        with self._lock:
            return list(self._doubts)

    def add(self, line: str) -> None:
        """Add a note, unless one with the same first line was added before."""
        self._add(Note(line, is_doubt=False))

    def doubt(self, line: str) -> None:
        """Add a reason why the bits may be others on another number of workers, or after a resume.

        It completes the sentence "same bits: no, because ...", and names what is to blame: the
        module, the attribute, the line.
        """
        self._add(Note(line, is_doubt=True))

    def question_values(self, line: str) -> None:
        """Add a reason why the values may not be those that the script means: a likely mistake."""
        self._add(Note(line, is_doubt=False, questions_values=True))

    def put(self, note: Note, found_on: str | None = None) -> None:
        """Add a note that was taken elsewhere: in a worker process, say.

        Args:
            found_on: whose name to say with it, if nobody else has come upon it: "rank 1".
        """
        self._add(note, found_on)

    def take(self) -> list[Note]:
        """Return the notes that are new since the last call."""
        if not self._new:  # asked after each update
            return []
        with self._lock:
            taken, self._new = self._new, []
            return taken

    def take_doubts(self) -> list[str]:
        """Return the doubts that arose since the last call."""
        if not self._unreported:
            return []
        with self._lock:
            taken, self._unreported = self._unreported, []
            return taken

    def remember(self, doubts: Iterable[str]) -> None:
        """Take over the doubts of a run that goes on; they were said when they arose."""
        with self._lock:
            for about in doubts:
                if about not in self._known:
                    self._known.add(about)
                    self._doubts.append(about)

    def _add(self, note: Note, found_on: str | None = None) -> None:
        about = note.text.partition("\n")[0]
        with self._lock:
            if about in self._known:
                return
            self._known.add(about)
            if found_on is not None:
                note = note._replace(text=f"on {found_on}, {note.text}")
                about = f"on {found_on}, {about}"
                if about in self._known:  # in the run that goes on
                    return
                self._known.add(about)
            self._new.append(note)
            if note.is_doubt:
                self._doubts.append(about)
                self._unreported.append(about)
