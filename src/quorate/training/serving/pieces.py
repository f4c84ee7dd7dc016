"""Pieces: the parts of parameters in a slice, and the JSON form of optimizer entries of pieces."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from math import prod
from typing import Any, NamedTuple

import torch

from quorate.engines.servers import Image, as_bytes, joined
from quorate.replica.flat import Layout, Section
from quorate.training.optimizing.known_optimizers import COUNTERS

Entry = tuple[str, str, Any]  # of an optimizer's state: parameter, name, value


class Piece(NamedTuple):
    """A stretch of one parameter, in the order of memory."""

    name: str  # name of the parameter
    start: int  # offset in the parameter
    length: int
    dtype: str

    @property
    def stop(self) -> int:
        """The first element behind the piece."""
        return self.start + self.length


def pieces(layout: Layout, stretches: list[range]) -> list[Piece]:
    """Return the pieces of a slice, in the order of the slice.

    Args:
        stretches: stretch of each vector in the slice.
    """
    found = []
    for section in sorted(layout.sections.values(), key=lambda s: (s.vector, s.start)):
        of = stretches[section.vector]
        start = max(section.start, of.start)
        length = min(section.start + prod(section.shape), of.stop) - start
        if length > 0:
            dtype = str(layout.dtypes[section.vector]).removeprefix("torch.")
            found.append(Piece(section.name, start - section.start, length, dtype))
    return found


def in_memory_order(value: torch.Tensor) -> torch.Tensor:
    """Return the elements of a dense tensor in the order of memory: a view."""
    return value.detach().as_strided((value.numel(),), (1,), value.storage_offset())


def shaped(values: torch.Tensor, section: Section) -> torch.Tensor:
    """Return the result of ``in_memory_order`` in a parameter's shape."""
    return values.as_strided(section.shape, section.stride, values.storage_offset())


# --- values of groups, and entries kept once per tensor
# --------------------------------------------


def to_json(value: Any) -> Any:
    """Return a plain value, a tuple, or a tensor of a few elements for JSON."""
    if isinstance(value, torch.Tensor):
        return {"tensor": str(value.dtype).removeprefix("torch."), "values": value.tolist()}
    if isinstance(value, tuple):
        return {"tuple": [to_json(item) for item in value]}
    return value


def from_json(value: Any) -> Any:
    """Return the value encoded by ``to_json``."""
    if not isinstance(value, dict):
        return value
    if "tuple" in value:
        return tuple(from_json(item) for item in value["tuple"])
    return torch.tensor(value["values"], dtype=getattr(torch, value["tensor"]))


# --- the state of an optimizer --------------------------------------------------------------------


def is_by_element(entry: str, value: object) -> bool:
    """Return whether an entry has a value for each element."""
    return isinstance(value, torch.Tensor) and entry not in COUNTERS


def told(entries: Iterable[Entry]) -> tuple[list[list[Any]], Image]:
    """Return entries as a list for JSON, and the bytes of entries per element, as vectors."""
    listed: list[list[Any]] = []
    images = list[Image]()
    for name, entry, value in entries:
        if is_by_element(entry, value):
            images.append(as_bytes(value))
            listed.append([name, entry, str(value.dtype).removeprefix("torch."), None])
        else:
            listed.append([name, entry, None, to_json(value)])
    return listed, joined(images)


def taken(listed: Iterable[list[Any]], lengths: Mapping[str, int], image: Image) -> Iterator[Entry]:
    """Yield the entries encoded by ``told``, in memory of their own.

    Args:
        lengths: lengths of the pieces, by parameter.
    """
    at = 0
    for name, entry, dtype, value in listed:
        if dtype is None:
            yield name, entry, from_json(value)
            continue
        values = torch.empty(lengths[name], dtype=getattr(torch, dtype))
        target = as_bytes(values)
        target[:] = image[at : at + target.nbytes]
        at += target.nbytes
        yield name, entry, values
