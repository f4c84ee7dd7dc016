"""Containers that code reaches by globals and closures: all towers have the same ones.

A hook that leaves an activation in a global dict leaves it for every tower. Whether a container is
written to is seen around one shard that is computed alone.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from itertools import islice
from typing import Any, NamedTuple

import torch

from quorate.replica.torch_internals import version

MOST_ITEMS = 1000  # of a container that are looked at: a list of rows is no list of activations

_Content = list[tuple[Any, Any, int]]  # name, value, and how often it was written, if a tensor


_Items = Sequence[tuple[Any, Any]]


class Container(NamedTuple):
    """Something that code may write to, and how it was reached."""

    items: Callable[[], Iterable[tuple[Any, Any]]]
    way: str
    owner: object  # by whose ``id`` it is known; kept, or that would become another's
    put: Callable[[_Items], None]  # makes it hold these, and nothing else

    @classmethod
    def of(cls, value: Any, way: str) -> Container:
        """Return a mapping, list or set, or an object with attributes, as a container."""
        if isinstance(value, Mapping):
            return cls(value.items, way, value, partial(_put_mapping, value))
        if isinstance(value, Iterable) and not isinstance(value, torch.nn.Module):
            return cls(lambda: enumerate(value), way, value, partial(_put_sequence, value))
        return cls(
            lambda: vars(value).items(), way, value, lambda old: _put_mapping(vars(value), old)
        )


class Contents:
    """What containers hold at one time, to be put back."""

    def __init__(self, containers: Iterable[Container]) -> None:
        self._held = [(container, _content(container)) for container in containers]

    def restore(self) -> None:
        """Have them hold it again, where they hold something else now."""
        for container, before in self._held:
            after = _content(container)
            if _differ(before, after) and max(len(before), len(after)) < MOST_ITEMS:
                _put_all([(container, before)])

    @contextmanager
    def put_back(self) -> Iterator[None]:
        """Within the block they hold it again, and afterwards what they held before the block."""
        now = [(container, _content(container)) for container, _ in self._held]
        other = [
            (before, after)
            for before, after in zip(self._held, now, strict=True)
            # Of a long one only a part is known.
            if _differ(before[1], after[1]) and max(map(len, (before[1], after[1]))) < MOST_ITEMS
        ]
        _put_all(before for before, _ in other)
        try:
            yield
        finally:
            _put_all(after for _, after in other)


@contextmanager
def written(containers: Iterable[Container]) -> Iterator[list[Container]]:
    """Yield a list that has, after the block, those which were written to within it."""
    before = [(container, _content(container)) for container in containers]
    changed: list[Container] = []
    yield changed
    changed += [container for container, old in before if _differ(old, _content(container))]


def _put_all(contents: Iterable[tuple[Container, _Content]]) -> None:
    for container, content in contents:
        with suppress(Exception):  # one that lets nobody write to it
            container.put([(name, value) for name, value, _ in content])


def _put_mapping(target: Any, items: _Items) -> None:
    target.clear()
    target.update(items)


def _put_sequence(target: Any, items: _Items) -> None:
    if isinstance(target, (list, deque, set)):
        target.clear()
        for _, value in items:
            (target.add if isinstance(target, set) else target.append)(value)


def _content(container: Container) -> _Content:
    try:
        items = list(islice(container.items(), MOST_ITEMS))
    except (RuntimeError, TypeError):  # another thread writes to it, or it cannot be read
        return []
    return [(k, v, version(v) if isinstance(v, torch.Tensor) else 0) for k, v in items]


def _differ(old: _Content, new: _Content) -> bool:
    # The old values are held, and so an identity is not another value's.
    return [(k, id(v), n) for k, v, n in old] != [(k, id(v), n) for k, v, n in new]
