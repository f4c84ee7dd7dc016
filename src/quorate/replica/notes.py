"""Notes of replicas to the user: each is shown once, from any number of workers.

A note may have several lines. The first line identifies the note: further notes with the same first
line are not shown. A doubt is a note with a reason why another number of workers may give different
bits; doubts are saved with the run. A note on questionable values gives a reason why the run does
not train as the script intends, with the same bits on any number of workers.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable
from typing import NamedTuple


class Note(NamedTuple):
    """A line for the user, shown once."""

    text: str
    is_doubt: bool  # whether the note is a reason why the run may have other bits
    questions_values: bool = False  # whether the note is a reason why values may not be as intended

    def __str__(self) -> str:
        if self.questions_values:
            return f"values in doubt: {self.text}"
        return f"same bits: no, because {self.text}" if self.is_doubt else self.text


class Notes:
    """Notes to be shown, and all doubts so far. Any thread may add a note."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._known: set[str] = set()
        self._new: list[Note] = []
        self._doubts: list[str] = []
        self._unreported: list[str] = []

    @property
    def doubts(self) -> list[str]:
        """The reasons why the run may have other bits: first lines, the oldest first."""
        with self._lock:
            return list(self._doubts)

    def add(self, line: str) -> None:
        """Add a note, unless a note with the same first line was added before."""
        self._add(Note(line, is_doubt=False))

    def doubt(self, line: str) -> None:
        """Add a reason why the bits may differ on another number of workers, or after a resume.

        The text completes the sentence "same bits: no, because ...", and names the culprit: the
        module, the attribute, the line.
        """
        self._add(Note(line, is_doubt=True))

    def question_values(self, line: str) -> None:
        """Add a reason why the values may not be as intended: a likely mistake in the script."""
        self._add(Note(line, is_doubt=False, questions_values=True))

    def put(self, note: Note, found_on: str | None = None) -> None:
        """Add a note taken from other notes, for example of a worker process.

        Args:
            found_on: the finder's name, such as "rank 1", shown unless another finder is known.
        """
        self._add(note, found_on)

    def take(self) -> list[Note]:
        """Return the notes added since the last call."""
        if not self._new:  # called after each update
            return []
        with self._lock:
            taken, self._new = self._new, []
            return taken

    def take_doubts(self) -> list[str]:
        """Return the doubts added since the last call."""
        if not self._unreported:
            return []
        with self._lock:
            taken, self._unreported = self._unreported, []
            return taken

    def remember(self, doubts: Iterable[str]) -> None:
        """Add the doubts of a resumed run, which were shown when they arose."""
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
                if about in self._known:  # in the resumed run
                    return
                self._known.add(about)
            self._new.append(note)
            if note.is_doubt:
                self._doubts.append(about)
                self._unreported.append(about)
