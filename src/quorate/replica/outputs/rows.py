"""Outputs by row: a function's results for the rows of a shard, checked and copied to the host.

A tensor (or array) has the rows in dimension 0. Tuples and dicts hold several outputs, with any
nesting. A list has one item per row, of any size, such as the boxes of an image, or a text.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np
import torch

from quorate.errors import OutputError

# Items of a list may be tensors, values of these types, and dicts, lists and tuples of both.
PLAIN = (bool, int, float, str)


class Piece(NamedTuple):
    """The outputs for the rows of a shard."""

    step: int
    shard: int
    value: Any  # a result of ``checked``


def checked(value: Any, rows: int, name: str) -> Any:
    """Return a copy of one shard's outputs, in new memory on the host.

    Args:
        value: a function's result.
        rows: number of rows of the shard.
        name: name of the outputs in messages.

    Raises:
        OutputError: a part of the value is not by row.
    """
    if isinstance(value, np.ndarray) and value.dtype.kind in "biufc":
        value = torch.from_numpy(np.ascontiguousarray(value))
    if isinstance(value, torch.Tensor):
        if value.ndim == 0 or value.shape[0] != rows:
            raise OutputError(
                name,
                got=f"a tensor of shape {tuple(value.shape)} for {rows} rows",
                expected="the rows in dimension 0",
                fix="return one entry per row",
            )
        return _copied(value, name)
    if isinstance(value, Mapping):
        # None: a part that Hugging Face's outputs leave out.
        inner = {key: part for key, part in value.items() if part is not None}
        for key in inner:
            if not isinstance(key, str) or not key:
                raise OutputError(
                    name,
                    got=f"the key {key!r}",
                    expected="names",
                    fix="name each output",
                )
        return {key: checked(part, rows, f"{name}[{key!r}]") for key, part in inner.items()}
    if isinstance(value, tuple):
        return tuple(checked(part, rows, f"{name}[{at}]") for at, part in enumerate(value))
    if isinstance(value, list):
        if len(value) != rows:
            raise OutputError(
                name,
                got=f"a list of {len(value)} for {rows} rows",
                expected="one item per row",
                fix="return a tuple or a dict of several outputs",
            )
        return [_item(item, f"{name}[{at}]") for at, item in enumerate(value)]
    kind = type(value).__name__
    raise OutputError(
        name,
        got=kind,
        expected="a tensor, a tuple or dict of such, or a list with one item per row",
    )


def structure_of(value: Any) -> Any:
    """Return the nesting of outputs for JSON: "rows" stands for a tensor, "items" for a list."""
    if isinstance(value, dict):
        return {"dict": {key: structure_of(part) for key, part in value.items()}}
    if isinstance(value, tuple):
        return {"tuple": [structure_of(part) for part in value]}
    return "items" if isinstance(value, list) else "rows"


def leaves(value: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Yield each tensor and list with its path of names and numbers."""
    if isinstance(value, dict | tuple):
        named = value.items() if isinstance(value, dict) else enumerate(value)
        for key, part in named:
            yield from leaves(part, (*path, str(key)))
    else:
        yield path, value


def nested(structure: Any, columns: Iterator[Any]) -> Any:
    """Return a structure of ``structure_of`` with the given leaves, in the order of ``leaves``."""
    if isinstance(structure, str):
        return next(columns)
    kind, inner = next(iter(structure.items()))
    if kind == "dict":
        return {key: nested(part, columns) for key, part in inner.items()}
    return tuple(nested(part, columns) for part in inner)


def _item(value: Any, name: str) -> Any:
    """Return a copy of an item of a list."""
    if value is None or isinstance(value, PLAIN):
        return value
    if isinstance(value, np.generic) and value.dtype.kind in "biuf":
        return value.item()
    if isinstance(value, np.ndarray) and value.dtype.kind in "biufc":
        value = torch.from_numpy(np.ascontiguousarray(value))
    if isinstance(value, torch.Tensor):
        return _copied(value, name)
    if isinstance(value, Mapping) and all(isinstance(key, str) for key in value):
        return {key: _item(part, f"{name}[{key!r}]") for key, part in value.items()}
    if isinstance(value, list | tuple):
        parts = [_item(part, f"{name}[{at}]") for at, part in enumerate(value)]
        return tuple(parts) if isinstance(value, tuple) else parts
    raise OutputError(
        name,
        got=type(value).__name__,
        expected="a tensor, a number, a text, or dicts, lists and tuples of such",
    )


def _copied(value: torch.Tensor, name: str) -> torch.Tensor:
    if value.layout is not torch.strided or value.is_quantized:
        raise OutputError(
            name,
            got=f"a tensor of {value.layout}",
            expected="a dense one",
            fix="call .to_dense()",
        )  # fmt: skip
    # The result may be a part of the batch, of a buffer, or of a cache of the function.
    copy = torch.empty(value.shape, dtype=value.dtype)
    return copy.copy_(value.detach().resolve_conj().resolve_neg())
