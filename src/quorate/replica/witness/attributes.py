"""The attributes of a model's modules: finds modules with different objects in attributes."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from itertools import chain
from operator import is_, itemgetter

import torch

_Reader = Callable[[Mapping[str, object]], tuple[object, ...]]


class AttributeObjects:
    """The objects in the attributes of each module at the last look, without their contents.

    The objects are kept alive, so that their ids stay unique.

    Args:
        but: names of attributes to ignore in comparisons.
    """

    def __init__(self, modules: Sequence[torch.nn.Module], but: Collection[str] = ()) -> None:
        self._modules, self._but = modules, but
        self._held: list[list[object]] = []  # by module; empty: never looked at
        self._sizes: list[int] = []
        self._readers: list[_Reader] = []  # of compared attributes, from the table of each module
        self._all: list[object] = []  # of all modules

    def forget(self) -> None:
        """Treat all modules as changed at the next look."""
        self._held, self._sizes, self._readers, self._all = [], [], [], []

    def changed(self) -> list[int]:
        """Return the numbers of the modules with other attributes than at the last look."""
        tables = [*map(vars, self._modules)]
        sizes = [*map(len, tables)]
        # The usual case between two updates: a single pass, with a call per module.
        if sizes == self._sizes and self._are_all(tables):
            return []
        before: Sequence[list[object] | None] = self._held or [None] * len(tables)
        self._held = [[*table.values()] for table in tables]
        self._sizes = sizes
        self._readers = [_reader([n for n in table if n not in self._but]) for table in tables]
        self._all = self._read(tables)
        pairs = enumerate(zip(before, self._held, strict=True))
        return [number for number, (old, new) in pairs if old is None or not _are_same(old, new)]

    def _are_all(self, tables: Sequence[Mapping[str, object]]) -> bool:
        """Return whether modules with unchanged numbers of attributes have the same attributes."""
        try:
            now = self._read(tables)
        except KeyError:  # an attribute has another name
            return False
        return all(map(is_, now, self._all))

    def _read(self, tables: Sequence[Mapping[str, object]]) -> list[object]:
        read = zip(self._readers, tables, strict=True)
        return [*chain.from_iterable([reader(table) for reader, table in read])]


def _reader(names: Sequence[str]) -> _Reader:
    """Return a reader of the named attributes from a table."""
    if len(names) == 1:  # for a single name, it would return the value itself
        return itemgetter(*names, *names)
    return itemgetter(*names) if names else _nothing


def _nothing(_table: Mapping[str, object]) -> tuple[object, ...]:
    return ()


def _are_same(one: Sequence[object], other: Sequence[object]) -> bool:
    return len(one) == len(other) and all(map(is_, one, other))
