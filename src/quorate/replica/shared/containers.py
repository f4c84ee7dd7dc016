"""Containers that code reaches by globals and closures: all towers have the same ones.

A hook that leaves an activation in a global dict leaves it for every tower. Whether a container is
written to is seen around one shard that is computed alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from itertools import islice
from typing import Any, NamedTuple

import torch

from quorate.replica.torch_internals import version

MOST_ITEMS = 1000  # of a container that are looked at: a list of rows is no list of activations

_Content = list[tuple[Any, Any, int]]  # name, value, and how often it was written, if a tensor


class Container(NamedTuple):
    """Something that code may write to, and how it was reached."""

    items: Callable[[], Iterable[tuple[Any, Any]]]
    way: str
    owner: object  # by whose ``id`` it is known; kept, or that would become another's

    @classmethod
    def of(cls, value: Any, way: str) -> Container:
        """Return a mapping, list or set, or an object with attributes, as a container."""
        if isinstance(value, Mapping):
            return cls(value.items, way, value)
        if isinstance(value, Iterable):
            return cls(lambda: enumerate(value), way, value)
        return cls(lambda: vars(value).items(), way, value)


@contextmanager
def written(containers: Iterable[Container]) -> Iterator[list[Container]]:
    """Yield a list that has, after the block, those which were written to within it."""
    before = [(container, _content(container)) for container in containers]
    changed: list[Container] = []
    yield changed
    changed += [container for container, old in before if _differ(old, _content(container))]


def _content(container: Container) -> _Content:
    try:
        items = list(islice(container.items(), MOST_ITEMS))
    except (RuntimeError, TypeError):  # another thread writes to it, or it cannot be read
        return []
    return [(k, v, version(v) if isinstance(v, torch.Tensor) else 0) for k, v in items]


def _differ(old: _Content, new: _Content) -> bool:
    # The old values are held, and so an identity is not another value's.
    return [(k, id(v), n) for k, v, n in old] != [(k, id(v), n) for k, v, n in new]
