"""Entries of an optimizer's state, by parameter or by piece, and as owners of pieces are told them.

An entry of an element-wise optimizer has a value for each element, or one value for a parameter. A
message lists all entries with their single values; the values per element travel by themselves, see
``slice_files.py``.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch

from quorate.engines.partition import Piece
from quorate.replica.flat import Section
from quorate.replica.torch_internals import version
from quorate.training.optimizing.known_optimizers import is_by_element

Entries = dict[str, dict[str, Any]]  # by parameter or by key of a piece, then by name of the entry
# Of each entry: parameter or key, name, dtype and None; or None and the single value.
Listing = list[list[Any]]


def in_memory_order(value: torch.Tensor) -> torch.Tensor:
    """Return the elements of a dense tensor in the order of memory: a view."""
    return value.detach().as_strided((value.numel(),), (1,), value.storage_offset())


def of_pieces(entries: Mapping[str, Mapping[str, Any]], pieces: Iterable[Piece]) -> Entries:
    """Return the entries of some pieces, by key, from those of whole parameters: views."""
    return {
        piece.key: {
            entry: in_memory_order(value)[piece.start : piece.stop]
            if is_by_element(entry, value)
            else value
            for entry, value in entries[piece.name].items()
        }
        for piece in pieces
    }


def listing_of(entries: Mapping[str, Mapping[str, Any]]) -> Listing:
    """Return the message about entries, without values per element."""
    return [
        [name, entry, str(value.dtype).removeprefix("torch."), None]
        if is_by_element(entry, value)
        else [name, entry, None, value]
        for name, of_one in entries.items()
        for entry, value in of_one.items()
    ]


def meta_entries(listing: Listing, sections: Mapping[str, Section]) -> Entries:
    """Return the entries of a message; values per element are on "meta", without memory.

    Args:
        sections: places of the parameters or pieces, all of which are in the result.
    """
    entries: Entries = {name: {} for name in sections}
    for name, entry, dtype, value in listing:
        if dtype is not None:
            shape, stride = sections[name].shape, sections[name].stride
            kind = getattr(torch, dtype)
            value = torch.empty_strided(shape, stride, dtype=kind, device="meta")
        entries[name].setdefault(entry, value)
    return entries


# --- changes by user code -------------------------------------------------------------------------


class SameObject:
    """An identity: compares equal to a ``SameObject`` of the same object.

    The object is kept alive, so that its id is not reused.
    """

    __hash__ = None  # type: ignore[assignment]

    def __init__(self, value: object) -> None:
        self._value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, SameObject) and other._value is self._value


def marks(value: Any) -> list[Any]:
    """Return marks that change if a tree changes: its tensors, and how often each was written."""
    if isinstance(value, torch.Tensor):
        return [SameObject(value), version(value)]
    if isinstance(value, dict):
        return [mark for key, item in value.items() for mark in (SameObject(key), *marks(item))]
    if isinstance(value, (list, tuple)):
        return [mark for item in value for mark in marks(item)]
    return [value if isinstance(value, (bool, int, float, str)) else SameObject(value)]
