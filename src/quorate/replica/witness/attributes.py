"""The attributes of a model's modules: which modules have other objects in them than before."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from itertools import chain
from operator import is_, itemgetter

import torch

_Reader = Callable[[Mapping[str, object]], tuple[object, ...]]


class Attributes:
    """What is in each module, as it was looked at last; objects, and not what is in those.

    They are held, so that no other object can be taken for one of them.

    Args:
        but: names of some that nobody looks at: a module that has others there alone has not
            changed.
    """

    def __init__(self, modules: Sequence[torch.nn.Module], but: Collection[str] = ()) -> None:
        self._modules, self._but = modules, but
        self._held: list[list[object]] = []  # by module; none: never looked at
        self._sizes: list[int] = []
        self._readers: list[_Reader] = []  # of what is looked at, from the table of each module
        self._all: list[object] = []  # of all modules

    def forget(self) -> None:
        """Take all of them for new at the next look."""
        self._held, self._sizes, self._readers, self._all = [], [], [], []

    def changed(self) -> list[int]:
        """Return the numbers of the modules with other attributes than at the last look."""
        tables = [*map(vars, self._modules)]
        sizes = [*map(len, tables)]
        # Between two updates, as a rule: one pass, with a call for each module.
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
        """Whether modules with as many attributes as before have the same ones."""
        try:
            now = self._read(tables)
        except KeyError:  # one has another name
            return False
        return all(map(is_, now, self._all))

    def _read(self, tables: Sequence[Mapping[str, object]]) -> list[object]:
        read = zip(self._readers, tables, strict=True)
        return [*chain.from_iterable([reader(table) for reader, table in read])]


def _reader(names: Sequence[str]) -> _Reader:
    """Return what reads these from a table."""
    if len(names) == 1:  # of which it would return the value itself
        return itemgetter(*names, *names)
    return itemgetter(*names) if names else _nothing


def _nothing(_table: Mapping[str, object]) -> tuple[object, ...]:
    return ()


def _are_same(one: Sequence[object], other: Sequence[object]) -> bool:
    return len(one) == len(other) and all(map(is_, one, other))
