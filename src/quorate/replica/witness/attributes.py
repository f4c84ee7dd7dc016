"""The attributes of a model's modules: which modules have other objects in them than before."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from operator import is_, methodcaller

import torch

_VALUES = methodcaller("values")


class Attributes:
    """What is in each module, as it was looked at last; objects, and not what is in those.

    They are held, so that no other object can be taken for one of them.
    """

    def __init__(self, modules: Sequence[torch.nn.Module]) -> None:
        self._modules = modules
        self._held: list[list[object]] = []  # by module; none: never looked at
        self._sizes: list[int] = []
        self._all: list[object] = []  # of all modules

    def forget(self) -> None:
        """Take all of them for new at the next look."""
        self._held, self._sizes, self._all = [], [], []

    def changed(self) -> list[int]:
        """Return the numbers of the modules with other attributes than at the last look."""
        tables = [*map(vars, self._modules)]
        sizes, now = [*map(len, tables)], [*chain.from_iterable(map(_VALUES, tables))]
        # Between two updates, as a rule: one pass, without a line of Python for each module.
        if sizes == self._sizes and all(map(is_, now, self._all)):
            return []
        before: Sequence[list[object] | None] = self._held or [None] * len(tables)
        self._held = [[*table.values()] for table in tables]
        self._sizes, self._all = sizes, now
        pairs = enumerate(zip(before, self._held, strict=True))
        return [number for number, (old, new) in pairs if old is None or not _are_same(old, new)]


def _are_same(one: Sequence[object], other: Sequence[object]) -> bool:
    return len(one) == len(other) and all(map(is_, one, other))
