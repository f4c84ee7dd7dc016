"""Rows that a replica was given in a training: what they were, to ask for them again.

A dataset that gives other values from the second time on, or that remembers what it was asked
before, is the same twice in a row. It is another when training has asked for other rows meanwhile.
"""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol
from weakref import ref

from quorate.replica.fingerprint import fingerprint


class Loads(Protocol):
    """What loads rows of a dataset."""

    dataset: Any


class Given(NamedTuple):
    """The rows of one shard, as they were loaded for training."""

    source: ref[Loads]  # what loaded them: as long as there is a training
    ticket: tuple[int, int]  # step and shard
    text: str  # fingerprint

    @classmethod
    def of(cls, source: Loads, ticket: tuple[int, int], data: Any) -> Given:
        """Return what is kept of rows. One pass over them; user code has not written them yet."""
        return cls(ref(source), ticket, fingerprint(data))

    def is_of(self, source: Loads) -> bool:
        """Whether rows of a source are those of the same dataset, in a training under way."""
        loaded = self.source()
        return loaded is not None and loaded.dataset is source.dataset
