"""The structure of a batch: tensors in lists, tuples and dicts, nested; all else is left alone."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, MutableMapping
from typing import Any

import torch


def mapped(batch: Any, each: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """The same structure with ``each(tensor)`` in the place of every tensor."""
    if isinstance(batch, torch.Tensor):
        return each(batch)
    if isinstance(batch, MutableMapping):
        made = copy.copy(batch)
        made.update({name: mapped(value, each) for name, value in batch.items()})
        return made
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(mapped(value, each) for value in batch))
    if isinstance(batch, (list, tuple)):
        return type(batch)(mapped(value, each) for value in batch)
    return batch


def leaves(batch: Any) -> Iterator[Any]:
    """The tensors in it, and whatever else is there, in a fixed order."""
    if isinstance(batch, MutableMapping):
        for value in batch.values():
            yield from leaves(value)
    elif isinstance(batch, (list, tuple)):
        for value in batch:
            yield from leaves(value)
    else:
        yield batch


def tensors(batch: Any) -> Iterator[torch.Tensor]:
    """The tensors in it, in a fixed order."""
    return (leaf for leaf in leaves(batch) if isinstance(leaf, torch.Tensor))
