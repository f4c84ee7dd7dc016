"""Nested batches: what is a container, and the ways to walk through one.

Containers are mappings (dicts, Hugging Face's outputs) and sequences (lists, tuples, named tuples,
deques); texts, bytes and ranges are none. All else is a leaf: tensors, arrays, numbers, objects of
the user's own.
"""

from __future__ import annotations

import copy
import operator
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping, Sequence
from typing import Any

import torch

_SEQUENCES_THAT_ARE_LEAVES = (str, bytes, bytearray, memoryview, range)


def parts(value: Any) -> Iterable[tuple[Any, Any]] | None:
    """Return what a container consists of, each part with its name or number; None for a leaf."""
    kind = type(value)  # first what is usual: to ask for an abstract class takes a while
    if kind is torch.Tensor:
        return None
    if kind is list or kind is tuple:
        return enumerate(value)
    if isinstance(value, Mapping):
        return value.items()
    if isinstance(value, Sequence) and not isinstance(value, _SEQUENCES_THAT_ARE_LEAVES):
        return enumerate(value)
    return None


def leaves(batch: Any) -> Iterator[Any]:
    """Return the tensors in a batch, and whatever else is there, in a fixed order."""
    inner = parts(batch)
    if inner is None:
        yield batch
    else:
        for _, part in inner:
            yield from leaves(part)


def tensors(batch: Any) -> Iterator[torch.Tensor]:
    """Return the tensors in a batch, in a fixed order."""
    return (leaf for leaf in leaves(batch) if isinstance(leaf, torch.Tensor))


def mapped(batch: Any, function: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """Return the same structure with ``function(tensor)`` in the place of every tensor."""
    return mapped_leaves(
        batch, lambda leaf: function(leaf) if isinstance(leaf, torch.Tensor) else leaf
    )


def mapped_leaves(value: Any, function: Callable[[Any], Any]) -> Any:
    """Return the same structure with ``function(leaf)`` in the place of every leaf.

    Lists, tuples and mappings are new ones, so that whoever takes something out of one leaves the
    batch of others as it is. Other sequences are left alone if nothing in them changes: not all can
    be made anew of their items.
    """
    kind = type(value)
    if kind is list or kind is tuple:  # the usual ones first
        return kind([mapped_leaves(part, function) for part in value])
    inner = parts(value)
    if inner is None:
        return function(value)
    items = {name: mapped_leaves(part, function) for name, part in inner}
    if isinstance(value, MutableMapping):
        copied = copy.copy(value)  # keeps what a mapping of a kind of its own has besides
        copied.update(items)
        return copied
    if isinstance(value, Mapping):
        return type(value)(items)  # type: ignore[call-arg]
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*items.values())
    changed = list(items.values())
    if not isinstance(value, (list, tuple)) and all(map(operator.is_, changed, value)):
        return value
    return type(value)(changed)
