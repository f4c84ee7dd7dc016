"""Columns: the rows of each tensor or list of the outputs, in order."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch

from quorate.errors import OutputError
from quorate.replica.outputs.rows import leaves, nested, structure_of

Path = tuple[str, ...]  # names and indices that lead to a tensor or list of the outputs


class Column(Protocol):
    """The destination of one tensor or list of the outputs."""

    def put(self, value: Any) -> None:
        """Add the next rows."""

    def finish(self) -> Any:
        """Return the whole column, after all rows were added."""


class Sink(Protocol):
    """The destination of outputs."""

    def put(self, value: Any, rows: int) -> None:
        """Add the outputs of the next rows.

        Raises:
            OutputError: the outputs differ in kind from those before.
        """

    def finish(self, about: dict[str, Any]) -> Any:
        """Return the result for the caller, after all rows were added."""


class Columns:
    """The columns of a prediction: made from the first outputs, and compared with later outputs.

    Args:
        make: makes a column for the first value of a path.
    """

    def __init__(self, make: Callable[[Path, Any], Column]) -> None:
        self._make = make
        self._columns: list[Column] = []
        self.paths: list[Path] = []
        self._first: list[Any] = []  # (trailing shape, dtype) of tensors, None for lists
        self.structure: Any = None
        self._rows = 0

    def put(self, value: Any, rows: int) -> None:
        """Add the outputs of the next rows."""
        structure, found = structure_of(value), [*leaves(value)]
        if self.structure is None:
            self.structure = structure
            self.paths = [path for path, _ in found]
            self._first = [_kind(leaf) for _, leaf in found]
            self._columns = [self._make(path, leaf) for path, leaf in found]
        if structure != self.structure:
            raise OutputError(
                "predict",
                got=f"{structure} for rows {self._rows} to {self._rows + rows - 1}",
                expected=f"{self.structure} as for the rows before",
                fix="return the same outputs for every batch",
            )
        for (path, leaf), first, column in zip(found, self._first, self._columns, strict=True):
            if _kind(leaf) != first:
                name = ".".join(path) or "the output"
                raise OutputError(
                    f"predict: {name}",
                    got=f"rows of {_words(_kind(leaf))} in rows {self._rows} to "
                    f"{self._rows + rows - 1}",
                    expected=f"{_words(first)} as before",
                    fix="return a list of rows, [*tensor], where sizes differ",
                )
            column.put(leaf)
        self._rows += rows

    def finish(self, about: dict[str, Any] | None = None) -> Any:  # noqa: ARG002
        """Return the finished columns, nested as the outputs."""
        return nested(self.structure, iter([column.finish() for column in self._columns]))


class _Tensor:
    def __init__(self, rows: int, first: torch.Tensor) -> None:
        self._values = torch.empty((rows, *first.shape[1:]), dtype=first.dtype)
        self._rows = 0

    def put(self, value: torch.Tensor) -> None:
        self._values[self._rows : self._rows + len(value)] = value
        self._rows += len(value)

    def finish(self) -> torch.Tensor:
        return self._values


class _List:
    def __init__(self) -> None:
        self._items: list[Any] = []

    def put(self, value: list[Any]) -> None:
        # Copied out of the parcel's memory: one memory mapping per shard would be too many.
        self._items += [_owned(item) for item in value]

    def finish(self) -> list[Any]:
        return self._items


def in_memory(rows: int) -> Sink:
    """Return a sink that keeps a number of rows in memory, nested as the outputs."""
    return Columns(lambda _, first: _List() if isinstance(first, list) else _Tensor(rows, first))


def _owned(item: Any) -> Any:
    if isinstance(item, torch.Tensor):
        return item.clone()
    if isinstance(item, dict):
        return {key: _owned(part) for key, part in item.items()}
    if isinstance(item, list | tuple):
        return type(item)(_owned(part) for part in item)
    return item


def _kind(leaf: Any) -> Any:
    return None if isinstance(leaf, list) else (tuple(leaf.shape[1:]), leaf.dtype)


def _words(kind: Any) -> str:
    return "items of a list" if kind is None else f"shape {kind[0]} and {kind[1]}"
