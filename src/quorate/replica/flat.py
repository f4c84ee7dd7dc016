"""Flat storage: many tensors as views of a vector per dtype.

A pull, a push, a sum, a fused optimizer step and a snapshot are each a pass over a single vector.
Every tensor begins at a multiple of 64 bytes from an aligned start, for the same alignment of a
view in every replica: alignment can change the bits of matrix products. The gaps hold zeros.

Legend: P elements of a vector, gaps included.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from operator import attrgetter
from typing import Any, Protocol

import torch

from quorate.machine.shared_memory import Segment
from quorate.replica.quick.factors import as_factor
from quorate.replica.sparse.rows import Rows, is_by_rows, rows_of
from quorate.replica.torch_internals import copy_all

ALIGNMENT_BYTES = 64
LARGE = 1 << 17  # least number of elements for a separate operation on a tensor
_IS_SPARSE, _WANTS_GRADIENT = attrgetter("is_sparse"), attrgetter("requires_grad")


class Memory(Protocol):
    """Bytes for tensors, such as a ``Segment``."""

    def tensor(self, dtype: torch.dtype, count: int, start: int) -> torch.Tensor:
        """Return the (count,) elements from byte ``start`` on."""


@dataclass(frozen=True)
class Section:
    """The place of a tensor: ``vectors[vector][start : start + span]``."""

    name: str
    vector: int
    start: int
    span: int  # elements up to the next section, including the gap
    shape: tuple[int, ...]
    stride: tuple[int, ...]

    def view(self, vector: torch.Tensor) -> torch.Tensor:
        """Return the tensor as a view of its vector."""
        return vector.as_strided(self.shape, self.stride, vector.storage_offset() + self.start)


# Of each tensor: name, dtype, shape, strides.
Description = list[list[Any]]


class Layout:
    """The order of tensors in flat vectors, a vector per dtype in order of first appearance.

    Dense tensors keep their memory format (channels_last, for example); all others become
    contiguous.

    Args:
        tensors: the tensors by name.
        by_rows: names of tensors whose gradient is kept by rows. They lie behind all others, so the
            others have the same places in ``gradients``, where tensors by rows have no place.
    """

    def __init__(
        self, tensors: Iterable[tuple[str, torch.Tensor]], by_rows: Collection[str] = ()
    ) -> None:
        self.dtypes: list[torch.dtype] = []
        self.sizes: list[int] = []
        self.sections: dict[str, Section] = {}
        self.by_rows = frozenset(by_rows)
        self._of_gradients: Layout | None = None
        self.tables: dict[str, torch.dtype] = {}  # dtypes of gradients by rows, in ``gradients``
        tensors = [*tensors]
        for name, tensor in sorted(tensors, key=lambda named: named[0] in self.by_rows):
            if tensor.dtype not in self.dtypes:
                self.dtypes.append(tensor.dtype)
                self.sizes.append(0)
            vector = self.dtypes.index(tensor.dtype)
            unit = max(1, ALIGNMENT_BYTES // tensor.element_size())
            span = -(-tensor.numel() // unit) * unit
            # Memory that is never touched. On "meta", torch would import sympy: 0.6 s of a core in
            # every worker.
            like = torch.empty_strided(
                tensor.shape, tensor.stride(), dtype=torch.uint8, device="cpu"
            )
            stride = torch.empty_like(like).stride()
            self.sections[name] = Section(
                name, vector, self.sizes[vector], span, tuple(tensor.shape), tuple(stride)
            )
            self.sizes[vector] += span
        self.sections = {name: self.sections[name] for name, _ in tensors}

    def described(self) -> Description:
        """Return the layout as a message, without ``by_rows``."""
        dtypes = [str(dtype).removeprefix("torch.") for dtype in self.dtypes]
        sections = self.sections.values()
        return [[s.name, dtypes[s.vector], list(s.shape), list(s.stride)] for s in sections]

    @staticmethod
    def of(description: Description, by_rows: Collection[str] = ()) -> Layout:
        """Return the layout of a description."""
        tensors = (
            (name, torch.empty_strided(shape, stride, dtype=getattr(torch, dtype), device="meta"))
            for name, dtype, shape, stride in description
        )
        return Layout(tensors, by_rows)

    def new(self, device: torch.device) -> Flat:
        """Return zeroed vectors of this layout."""
        return Flat(
            self,
            [
                torch.zeros(size, dtype=dtype, device=device)
                for size, dtype in zip(self.sizes, self.dtypes, strict=True)
            ],
        )

    @property
    def gradients(self) -> Layout:
        """The layout of the tensors' gradients: this layout, unless some are kept by rows."""
        if not self.by_rows:
            return self
        if self._of_gradients is None:
            dense = {n: s for n, s in self.sections.items() if n not in self.by_rows}
            vectors = 1 + max((section.vector for section in dense.values()), default=0)
            made = Layout(())
            # At least one vector, even without elements, for the device of gradients.
            made.dtypes, made.sizes, made.sections = self.dtypes[:vectors], [0] * vectors, dense
            for section in dense.values():
                end = section.start + section.span
                made.sizes[section.vector] = max(made.sizes[section.vector], end)
            made.tables = {
                name: self.dtypes[section.vector]
                for name, section in self.sections.items()
                if name in self.by_rows
            }
            self._of_gradients = made
        return self._of_gradients

    def shared(self) -> Flat:
        """Return zeroed vectors of this layout in memory shared with further processes."""
        return self.over(Segment(max(1, self.nbytes)))

    def over(self, memory: Memory, start: int = 0) -> Flat:
        """Return vectors of this layout in memory, from byte ``start`` (a multiple of 64) on."""
        vectors, at = [], start
        for size, dtype in zip(self.sizes, self.dtypes, strict=True):
            vectors.append(memory.tensor(dtype, size, at))
            at += size * dtype.itemsize
        return Flat(self, vectors, memory if isinstance(memory, Segment) else None, start)

    @property
    def nbytes(self) -> int:
        """Bytes of all vectors, including gaps."""
        return sum(
            size * dtype.itemsize for size, dtype in zip(self.sizes, self.dtypes, strict=True)
        )


class Flat:
    """Vectors of a layout on a device, with a view per tensor."""

    def __init__(
        self,
        layout: Layout,
        vectors: list[torch.Tensor],
        segment: Segment | None = None,
        start: int = 0,
    ) -> None:
        self.layout = layout
        self.vectors = vectors  # one (P,) per dtype
        self.device = vectors[0].device if vectors else torch.device("cpu")  # of all vectors
        self.is_on_host = self.device.type == "cpu"
        # In a gradient: the parts kept by rows, if any, on this device.
        self.rows: dict[str, Rows] = {}
        self.made_dense: dict[str, Rows] = {}  # by ``fill``: gradients by rows that were made dense
        self._stretches: dict[tuple[str, ...], list[torch.Tensor]] = {}  # last of ``_without``
        self.segment = segment  # the segment of the vectors, if shared with processes
        self.start = start  # offset of the vectors in the segment, in bytes
        self.views: dict[str, torch.Tensor] = {
            name: section.view(vectors[section.vector]) for name, section in layout.sections.items()
        }

        self._all = [*self.views.values()]
        self._are_small = bool(self._all) and all(view.numel() < LARGE for view in self._all)

    def __reduce__(self) -> tuple[Any, ...]:
        """Return a pickle of the values, for memory of the process that reads the pickle."""
        return Flat, (self.layout, self.vectors)

    def part(self, names: Iterable[str]) -> Flat:
        """Return some of the tensors, in the same memory, as vectors without the other tensors."""
        layout, vectors = Layout(()), list[torch.Tensor]()
        for stretch, members in self.runs(names):
            start = self.layout.sections[members[0]].start
            for name in members:
                own = self.layout.sections[name]
                layout.sections[name] = replace(own, vector=len(vectors), start=own.start - start)
            vectors.append(stretch)
        layout.dtypes, layout.sizes = [v.dtype for v in vectors], [*map(len, vectors)]
        return Flat(layout, vectors)

    def new(self) -> Flat:
        """Return zeroed vectors of this layout, on the same device, and shared if these are."""
        return self.layout.new(self.device) if self.segment is None else self.layout.shared()

    def on(self, device: torch.device) -> Flat:
        """Return the values on a device: these vectors themselves, if already there."""
        return self if self.device == device else self.copied(device)

    def copied(self, device: torch.device | None = None) -> Flat:
        """Return a copy of the values, on the same device or on another."""
        copied = self.layout.new(device or self.device)
        copied.copy_(self)
        return copied

    def copy_(self, other: Flat) -> None:
        """Copy the values of vectors of the same layout."""
        for mine, theirs in zip(self.vectors, other.vectors, strict=True):
            mine.copy_(theirs, non_blocking=_may_run_ahead(mine))
        self.rows = {name: rows.on(self.device) for name, rows in other.rows.items()}

    def take(self, other: Flat) -> None:
        """Copy the values of the same tensors from vectors with any dtypes."""
        if self.layout is other.layout:
            self.copy_(other)
        else:
            mine, theirs = [*self.views.values()], [*other.views.values()]
            copy_all(mine, theirs, non_blocking=_may_run_ahead(*mine[:1]))

    def add_(self, other: Flat) -> Flat:
        """Add the values of vectors of the same layout, in place."""
        for mine, theirs in zip(self.vectors, other.vectors, strict=True):
            if theirs.device != mine.device:
                theirs = theirs.to(mine.device, non_blocking=_may_run_ahead(mine))
            mine.add_(theirs)
        self.add_rows(other)
        return self

    def add_rows(self, other: Flat) -> None:
        """Add only the parts kept by rows."""
        for name, theirs in other.rows.items():
            mine = self.rows.get(name)
            theirs = theirs.on(self.device)
            self.rows[name] = theirs if mine is None else mine.add(theirs)

    @property
    def named(self) -> dict[str, torch.Tensor]:
        """All values by name, for comparison; gradients by rows as rows, even if made dense."""
        found = dict(self.views)
        for name, rows in {**self.rows, **self.made_dense}.items():
            found |= {f"{name} (which rows)": rows.which, name: rows.values}
        return found

    @property
    def stretches(self) -> list[torch.Tensor]:
        """All values, as vectors: those of the layout, and the rows of each table."""
        if not self.rows:
            return [*self.vectors]
        return [*self.vectors, *(rows.values.view(-1) for _, rows in sorted(self.rows.items()))]

    def div_(self, divisor: float) -> None:
        """Divide all values, in place."""
        for vector in self.stretches:
            vector.div_(divisor)

    def mul_(self, factor: float) -> None:
        """Multiply all values, in place."""
        for vector in self.stretches:
            vector.mul_(factor)

    def expect(self, parameters: Mapping[str, torch.nn.Parameter], factor: float) -> None:
        """Prepare for a backward pass whose gradients ``fill`` receives: nothing to do here."""

    def fill(self, values: Mapping[str, torch.Tensor], factor: float = 1.0) -> None:
        """Copy tensors in, multiplied by a factor; tensors without a value become zero."""
        self.made_dense.clear()  # of the gradient before
        if tables := self.layout.tables:
            self.rows = {
                name: rows_of(values[name], dtype, self.device, factor)
                for name, dtype in tables.items()
                if name in values
            }
            values = {name: value for name, value in values.items() if name not in tables}
        if self._are_small and values.keys() == self.views.keys():
            sources = [*map(values.__getitem__, self.views)]
            # The usual case of a small model, without a line of Python per tensor.
            if not (any(map(_IS_SPARSE, sources)) or any(map(_WANTS_GRADIENT, sources))):
                copy_all(self._all, sources)
                if factor != 1.0:
                    for vector in self.vectors:
                        vector.mul_(as_factor(factor, vector))
                return
        self._fill(values, factor)

    @torch.no_grad()
    def _fill(self, values: Mapping[str, torch.Tensor], factor: float) -> None:
        fuses = factor != 1.0 and self.device.type == "cpu"
        targets, sources, fused = [], [], []
        for name, view in self.views.items():
            value = values.get(name)
            if value is None:
                view.zero_()
                continue
            if value.is_sparse:
                if is_by_rows(value):
                    rows = rows_of(value, view.dtype, view.device, factor)
                    self.made_dense[name] = rows
                value = value.to_dense()
            if fuses and view.numel() >= LARGE and are_alike(view, value):
                # Multiplied during the copy: in one pass over memory.
                torch.mul(value, factor, out=view)
                fused.append(name)
            else:
                targets.append(view)
                sources.append(value)
        if targets:
            copy_all(targets, sources)
        if factor != 1.0:
            for stretch in self._without(tuple(fused)):
                stretch.mul_(factor)

    def _without(self, names: tuple[str, ...]) -> list[torch.Tensor]:
        """Return the stretches of the vectors without the named tensors."""
        if names not in self._stretches:
            rest = [name for name in self.views if name not in names]
            self._stretches = {names: [stretch for stretch, _ in self.runs(rest)]}
        return self._stretches[names]

    def runs(self, names: Iterable[str]) -> Iterator[tuple[torch.Tensor, list[str]]]:
        """Yield maximal stretches of the vectors with no tensors but the named ones.

        Yields (a 1-D view, the names in order).
        """
        wanted = set(names)
        start, end, vector, members = 0, 0, -1, list[str]()
        for section in sorted(
            (s for n, s in self.layout.sections.items() if n in wanted),
            key=lambda s: (s.vector, s.start),
        ):
            if members and (section.vector != vector or section.start != end):
                yield self.vectors[vector][start:end], members
                members = []
            if not members:
                start, vector = section.start, section.vector
            members = [*members, section.name]
            end = section.start + section.span
        if members:
            yield self.vectors[vector][start:end], members


def are_alike(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Return whether two tensors have the same dtype and device."""
    return one.dtype == other.dtype and one.device == other.device


def _may_run_ahead(*targets: torch.Tensor) -> bool:
    """Return whether this thread need not wait for a copy, because later work of a device does."""
    return all(target.device.type != "cpu" for target in targets)
