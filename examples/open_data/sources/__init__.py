"""Sources: where a data set's files come from, each behind one small protocol.

A source only puts files into a directory that it is given. Whether they are the right ones is for
``open_data.fetch`` to say.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol


@dataclass(frozen=True)
class File:
    """A file of a data set."""

    name: str  # in the cache, uncompressed
    sha256: str  # of the uncompressed content, in lower-case hex


class Source(Protocol):
    """A place that files come from."""

    @property
    def title(self) -> str:
        """What messages call it."""

    def get(self, files: Sequence[File], into: Path) -> None:
        """Put the files, uncompressed and under their names, into an existing directory.

        Raises:
            OSError, DataError: with the reason why this source cannot.
        """


def one_line(reason: object) -> str:
    """Return a reason as a message of one line can hold it."""
    return " ".join(str(reason).split()) or repr(reason)
