"""Nested batches: the definition of a container, and ways to walk through a batch.

Containers are mappings (dicts, Hugging Face's outputs) and sequences (lists, tuples, named tuples,
deques), except texts, bytes and ranges. Everything else is a leaf: tensors, arrays, numbers,
objects of the user's classes.
"""

from __future__ import annotations

import copy
import operator
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping, Sequence
from typing import Any

import torch

_SEQUENCES_THAT_ARE_LEAVES = (str, bytes, bytearray, memoryview, range)


def parts(value: Any) -> Iterable[tuple[Any, Any]] | None:
    """Return the parts of a container, each with its name or number; None for a leaf."""
    kind = type(value)  # usual kinds first: a check against an abstract class is slow
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
    """Yield the leaves of a batch, tensors and others, in a fixed order."""
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
    """Return the same structure with ``function(tensor)`` instead of every tensor."""
    return mapped_leaves(
        batch, lambda leaf: function(leaf) if isinstance(leaf, torch.Tensor) else leaf
    )


def mapped_leaves(value: Any, function: Callable[[Any], Any]) -> Any:
    """Return the same structure with ``function(leaf)`` instead of every leaf.

    Lists, tuples and mappings are new objects: a removed item stays in the batch. Further sequences
    are returned unchanged if no item changes, because not every class can be made from items.
    """
    kind = type(value)
    if kind is list or kind is tuple:  # the usual kinds first
        return kind([mapped_leaves(part, function) for part in value])
    inner = parts(value)
    if inner is None:
        return function(value)
    items = {name: mapped_leaves(part, function) for name, part in inner}
    if isinstance(value, MutableMapping):
        copied = copy.copy(value)  # keeps further attributes of a subclass
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
