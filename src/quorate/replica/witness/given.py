"""Rows received by a replica in training, recorded for a comparison with a second load.

A dataset may return different values from the second time on, or depend on earlier requests. Two
loads in a row would then agree, but not with a load after training has requested further rows.
"""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol
from weakref import ref

from quorate.replica.fingerprint import fingerprint


class RowLoader(Protocol):
    """A loader of rows of a dataset."""

    dataset: Any


class LoadedRows(NamedTuple):
    """The rows of one shard, as loaded for training."""

    source: ref[RowLoader]  # the loader; weak, ends with the training
    ticket: tuple[int, int]  # step and shard
    text: str  # fingerprint

    @classmethod
    def of(cls, source: RowLoader, ticket: tuple[int, int], data: Any) -> LoadedRows:
        """Return the record of rows. Makes one pass over them, before user code can write them."""
        return cls(ref(source), ticket, fingerprint(data))

    def is_of(self, source: RowLoader) -> bool:
        """Return whether rows come from the same dataset as a source's, in a current training."""
        loaded = self.source()
        return loaded is not None and loaded.dataset is source.dataset
