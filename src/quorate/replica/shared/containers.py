"""Containers reached by globals and closures of code: all towers share them.

A hook that stores an activation in a global dict stores it for every tower. Writes to a
container are detected around a shard that is computed alone.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from itertools import islice
from typing import Any, NamedTuple

import numpy as np
import torch

from quorate.replica.torch_internals import version

MOST_ITEMS = 1000  # compared items of a container: a longer list holds rows, not activations
MOST_ELEMENTS = 1 << 16  # elements of a tensor or an array whose values are restored
MOST_IN_ALL = 1 << 23  # elements of all of them

_Content = list[tuple[Any, Any, int]]  # name, value, and number of writes, if a tensor


_Items = Sequence[tuple[Any, Any]]


class Container(NamedTuple):
    """An object that code may write, with the path to the object."""

    items: Callable[[], Iterable[tuple[Any, Any]]]
    way: str
    owner: object  # identified by its ``id``; kept alive, so that the id is not reused
    put: Callable[[_Items], None]  # replaces the content

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


class SharedContents:
    """The content of containers at one time, to be restored.

    Args:
        values: values written in place, beside those in the containers.
    """

    def __init__(self, containers: Iterable[Container], values: Iterable[Any] = ()) -> None:
        self._held = [(container, _content(container)) for container in containers]
        held = (value for _, content in self._held for _, value, _ in content)
        self._values = _restoring({id(value): value for value in (*values, *held)}.values())

    def restore(self) -> None:
        """Restore the content of containers that have changed.

        Small tensors and arrays get their values back too, and generators their states.
        """
        for container, before in self._held:
            after = _content(container)
            if _differ(before, after) and max(len(before), len(after)) < MOST_ITEMS:
                _put_all([(container, before)])
        for restore in self._values:
            with suppress(Exception):  # the object may be read-only
                restore()

    @contextmanager
    def put_back(self) -> Iterator[None]:
        """Restore the earlier content inside the block, and the present content afterwards."""
        now = [(container, _content(container)) for container, _ in self._held]
        other = [
            (before, after)
            for before, after in zip(self._held, now, strict=True)
            # Of a long container, only a part is known.
            if _differ(before[1], after[1]) and max(map(len, (before[1], after[1]))) < MOST_ITEMS
        ]
        _put_all(before for before, _ in other)
        try:
            yield
        finally:
            _put_all(after for _, after in other)


@contextmanager
def written(containers: Iterable[Container]) -> Iterator[list[Container]]:
    """Yield a list that has, after the block, the containers written in the block."""
    before = [(container, _content(container)) for container in containers]
    changed: list[Container] = []
    yield changed
    changed += [container for container, old in before if _differ(old, _content(container))]


def _restoring(values: Iterable[Any]) -> list[Callable[[], object]]:
    """Return functions that restore the content of values written in place."""
    found, left = list[Callable[[], object]](), MOST_IN_ALL
    for value in values:
        with suppress(Exception):  # a tensor may be impossible to copy, or its writes uncounted
            if isinstance(value, (torch.Tensor, np.ndarray)):
                size = value.numel() if isinstance(value, torch.Tensor) else value.size
                if size > min(left, MOST_ELEMENTS):
                    continue
                left -= size
            if (restore := _restored(value)) is not None:
                found.append(restore)
    return found


def _restored(value: Any) -> Callable[[], object] | None:
    if isinstance(value, torch.Tensor):
        before, written = value.detach().clone(), version(value)

        def restore() -> None:
            if version(value) != written:
                value.data.copy_(before)

        return restore
    if isinstance(value, np.ndarray):
        return partial(_copy_changed, value, value.copy())
    if isinstance(value, torch.Generator):
        return partial(value.set_state, value.get_state())
    if isinstance(value, np.random.Generator):
        return partial(setattr, value.bit_generator, "state", value.bit_generator.state)
    if isinstance(value, np.random.RandomState):
        return partial(value.set_state, value.get_state())
    if isinstance(value, random.Random):
        return partial(value.setstate, value.getstate())
    return None


def _copy_changed(array: np.ndarray[Any, Any], before: np.ndarray[Any, Any]) -> None:
    if not np.array_equal(array, before):  # not if equal: the array may be a mapped file
        np.copyto(array, before)


def _put_all(contents: Iterable[tuple[Container, _Content]]) -> None:
    for container, content in contents:
        with suppress(Exception):  # the container may be read-only
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
    except (RuntimeError, TypeError):  # a concurrent write, or an unreadable container
        return []
    return [(k, v, version(v) if isinstance(v, torch.Tensor) else 0) for k, v in items]


def _differ(old: _Content, new: _Content) -> bool:
    # The old values are kept alive, so their ids are not reused.
    return [(k, id(v), n) for k, v, n in old] != [(k, id(v), n) for k, v, n in new]
