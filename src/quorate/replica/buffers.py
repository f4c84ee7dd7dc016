"""The buffers of a model: BatchNorm's averages, counters, tables. Shards read and write buffers.

Floating-point and complex buffers become the weighted mean over the shards that changed them; a
buffer changed by no shard keeps its bits. An int64 buffer is a counter, and changes by the sum of
all additions; but if every shard added 1 (BatchNorm's count of batches), the counter grows by 1,
because a step is a single batch. The first shard's value is used for a counter lowered by a shard,
for a counter of a single element beside a queue (its pointer), and for all buffers of further
dtypes.

Legend: F elements of the floating-point buffers, f their number; C and c the same of the counters.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from quorate.errors import UserError
from quorate.machine.devices import has_float64
from quorate.replica.torch_internals import buffers_of, copy_all, version


class _BufferPlace(NamedTuple):
    """The place of a buffer."""

    label: str  # for messages
    table: Mapping[str, Any]
    name: str

    @property
    def tensor(self) -> torch.Tensor:
        found: torch.Tensor = self.table[self.name]
        return found


class Buffers:
    """The buffers of a module, as vectors: floating-point buffers, and the bytes of all others.

    Args:
        model: the module.
        mutable_frozen: numbers, in the model's order, of the frozen parameters written by the
            forward pass: Keras keeps statistics in such parameters. They are treated as buffers.
    """

    def __init__(self, model: torch.nn.Module, mutable_frozen: Collection[int] = ()) -> None:
        # Looked up anew at each use: a forward pass may replace the tensor of a buffer.
        places = [
            _BufferPlace(f"{path}.{name}".lstrip("."), buffers_of(module), name)
            for path, module in model.named_modules()
            for name, _ in module.named_buffers(recurse=False)
        ]
        places += [
            _BufferPlace(name, {name: parameter}, name)
            for number, (name, parameter) in enumerate(model.named_parameters())
            if number in mutable_frozen
        ]
        places = [*{id(place.tensor): place for place in reversed(places)}.values()][::-1]
        kinds = [p.tensor.is_floating_point() or p.tensor.is_complex() for p in places]
        self._floats = _Part([p for p, is_float in zip(places, kinds, strict=True) if is_float])
        others = [p for p, is_float in zip(places, kinds, strict=True) if not is_float]
        self._others = _Part(others)
        self._counters = _Part([p for p in others if p.tensor.dtype == torch.int64])
        self.are_any = bool(places)
        self._before: tuple[torch.Tensor | None, torch.Tensor | None] = (None, None)

    def floats(self) -> list[torch.Tensor]:
        """Return the present floating-point buffers, complex ones as pairs of numbers."""
        return self._floats.tensors()

    def others(self) -> list[torch.Tensor]:
        """Return the present buffers of all other dtypes."""
        return self._others.tensors()

    def copy_(self, source: Buffers) -> None:
        """Copy the values of the same buffers from another copy of the model."""
        if not self.are_any:
            return
        for mine, theirs in ((self.floats(), source.floats()), (self.others(), source.others())):
            if mine:
                copy_all(mine, theirs)

    # --- values -----------------------------------------------------------------------------------

    def values(self) -> torch.Tensor | None:
        """Return the values of floating-point buffers, in a vector as of ``change``: (F + ...,).

        float64 holds values of all narrower dtypes exactly.
        """
        if (size := self._size) == 0:
            return None
        values = self._floats.vector()
        vector = torch.zeros(size, dtype=torch.float64, device=_device(values, self._counters))
        if values is not None:
            vector[: len(values)] = values
        return vector

    def integer_buffers(self) -> torch.Tensor | None:
        """Return the bytes of all other buffers, as a uint8 vector.

        Raises:
            UserError: the dtype of a buffer has changed.
        """
        if not self.are_any:
            return None
        self._others.require_dtypes()
        values = _together(self.others())
        if not values:
            return None
        if len({value.dtype for value in values}) == 1:
            return torch.cat([value.reshape(-1) for value in values]).view(torch.uint8)
        return torch.cat([v.contiguous().reshape(-1).view(torch.uint8) for v in values])

    def set(self, values: torch.Tensor | None, integer_buffers: torch.Tensor | None) -> None:
        """Set the values returned by ``values()`` and ``integer_buffers()``."""
        if values is not None:
            self._floats.put(values[: self._floats.elements])
        if integer_buffers is not None:
            targets = self.others()
            sizes = [v.numel() * v.element_size() for v in targets]
            for target, part in zip(
                targets, torch.split_with_sizes(integer_buffers, sizes), strict=True
            ):
                target.copy_(part.clone().view(target.dtype).view(target.shape))

    def restore(self, values: Callable[[Buffers], None]) -> None:
        """Call ``values(self)``, which copies values into all buffers.

        Raises:
            UserError: the size of a buffer has changed.
        """
        try:
            values(self)
        except RuntimeError:
            for part in (self._floats, self._others):
                part.vector()  # raises an error with the name of the buffer
            raise

    # --- changes ----------------------------------------------------------------------------------

    def begin(self) -> None:
        """Note the values at the beginning of a shard."""
        if not self.are_any:
            return
        self._before = (self._floats.vector(), self._counters.vector())

    def change(self, weight: float) -> torch.Tensor | None:
        """Return the changes since ``begin`` by a shard of this weight, to be summed over shards.

        The result is one float64 vector, in which products of float32 values and row counts, and
        sums of such products, are exact: (F,) weight * values of changed buffers, else 0; (f,) the
        weight if the buffer changed, else 0; (C,) additions to counters; (c,) whether the shard
        lowered an element of a counter; (c,) whether the shard added more than one to an element;
        (c,) whether the shard added to some elements and not to all.

        Raises:
            UserError: the size of a buffer has changed.
        """
        if not self.are_any or (size := self._size) == 0:
            return None
        before, counted = self._before
        after, counts = self._floats.vector(), self._counters.vector()
        vector = torch.zeros(size, dtype=torch.float64, device=_device(after, self._counters))
        values, weights, added, lowered, more, mixed = torch.split_with_sizes(vector, self._sizes)
        if after is not None and before is not None and weight > 0 and not _equal(after, before):
            changed = self._floats.any_of(after != before)
            values.copy_(after).mul_(weight)
            if isinstance(changed, bool):
                weights.fill_(weight)
            else:
                values.masked_fill_(~self._floats.spread(changed), 0)  # 0 * nan is nan
                weights.copy_(changed).mul_(weight)
        if counts is not None and counted is not None and not _equal(counts, counted):
            difference = counts - counted
            added.copy_(difference)
            low, high = self._counters.extremes(difference)
            lowered.copy_(low < 0)
            more.copy_(high > 1)
            mixed.copy_(low != high)
        return vector

    def marks(self) -> list[tuple[torch.Tensor, int]]:
        """Return each buffer's tensor, with torch's count of writes to the tensor."""
        found = [*self.floats(), *self.others()]
        return [(tensor, 0 if tensor.is_inference() else version(tensor)) for tensor in found]

    def drop_writes(
        self, marks: list[tuple[torch.Tensor, int]], values: Callable[[Buffers], None]
    ) -> list[str]:
        """Undo writes since ``marks()``; return the names of changed buffers.

        Nothing is compared if nothing was written, as in most evaluations.

        Args:
            values: restores the values of all buffers at the time of ``marks()``.

        Raises:
            UserError: the size of a buffer has changed.
        """
        after = self.marks()
        if all(
            one is other and count == counted
            for (one, count), (other, counted) in zip(marks, after, strict=True)
        ):
            return []
        written = [tensor.clone() for tensor, _ in after]
        self.restore(values)
        names = [*self._floats.names, *self._others.names]
        now = [*self.floats(), *self.others()]
        return [n for n, w, t in zip(names, written, now, strict=True) if not torch.equal(w, t)]

    def take(
        self, change: torch.Tensor | None, first: torch.Tensor | None, shards: int
    ) -> list[str]:
        """Apply the changes of a step's shards: sums of ``change``, first ``integer_buffers``.

        Args:
            shards: number of shards.

        Returns:
            The names of buffers with rows that several shards wrote in part: a queue, a memory
                bank.
        """
        if not self.are_any:
            return []
        before, counted = self._floats.vector(), self._counters.vector()
        self.set(None, first)
        if change is None:
            return []
        values, weights, added, *marks = torch.split_with_sizes(change, self._sizes)
        queues: list[str] = []
        if before is not None:
            kept = before.to(change.device, torch.float64)
            divisors = self._floats.spread(weights)
            means = torch.where(divisors > 0, values / divisors, kept)
            self._floats.put(means)
            if shards > 1 and self._floats.has_rows:
                queues = self._floats.partly(means != kept, weights.tolist())
        if counted is not None:
            first_counts = self._counters.vector()
            assert first_counts is not None
            added = added.to(counted.device).round().to(torch.int64)
            lowered, more, mixed = (mark.to(counted.device) > 0 for mark in marks)
            for number in self._counters.pointers(queues):
                lowered[number] = True
            # Different additions by shards: counts of 0 and 1, to be summed like others.
            varied = self._counters.any_of((added > 0) & (added < shards))
            if isinstance(varied, bool):
                varied = torch.full_like(mixed, varied)
            summed = self._counters.spread(more | (mixed & varied))
            counted += torch.where(summed, added, (added > 0).to(torch.int64))
            is_first = self._counters.spread(lowered)
            self._counters.put(torch.where(is_first, first_counts, counted))
        return queues

    @property
    def _sizes(self) -> list[int]:
        f, c = len(self._floats.names), len(self._counters.names)
        return [self._floats.elements, f, self._counters.elements, c, c, c]

    @property
    def _size(self) -> int:
        return sum(self._sizes)


class _Part:
    """A part of a model's buffers, as one vector.

    Args:
        places: the places of the buffers.
    """

    def __init__(self, places: Sequence[_BufferPlace]) -> None:
        self.names = [place.label for place in places]
        self._places = places
        self._is_complex = any(place.tensor.is_complex() for place in places)
        found = self.tensors()
        self._shapes = [tensor.shape for tensor in found]
        self._dtypes = [tensor.dtype for tensor in found]
        self._sizes = [tensor.numel() for tensor in found]
        self.elements = sum(self._sizes)
        self._owner: dict[torch.device, torch.Tensor] = {}  # (elements,) index of each buffer

    def tensors(self) -> list[torch.Tensor]:
        """Return the present buffers, complex ones as pairs of numbers."""
        found = [table[name] for _, table, name in self._places]
        found = [tensor.detach() if tensor.requires_grad else tensor for tensor in found]
        return [_real(tensor) for tensor in found] if self._is_complex else found

    def vector(self) -> torch.Tensor | None:
        """Return a copy of all values, (elements,); None if there are no buffers.

        Raises:
            UserError: the size of a buffer has changed.
        """
        found = _together(self.tensors())
        if not found:
            return None
        if [tensor.numel() for tensor in found] != self._sizes:
            pairs = zip(self.names, self._shapes, found, strict=True)
            name, was, tensor = next(p for p in pairs if p[1] != p[2].shape)
            raise UserError(
                f"buffer {name!r}",
                got=f"shape {tuple(tensor.shape)} after a forward pass",
                expected=f"shape {tuple(was)} as before, because a buffer that grows cannot be "
                "carried from "
                "shard to shard",
                fix="call the model once on a batch before training, or keep the tensor in a "
                "plain attribute",
            )
        if not has_float64(found[0].device):
            found = [tensor.cpu() for tensor in found]
        if len({tensor.dtype for tensor in found}) > 1:
            found = [tensor.to(torch.float64) for tensor in found]
        return torch.cat([t if t.dim() == 1 else t.reshape(-1) for t in found])

    def require_dtypes(self) -> None:
        """Refuse a forward pass that changed the dtype of a buffer.

        Raises:
            UserError: a dtype has changed.
        """
        found = [tensor.dtype for tensor in self.tensors()]
        if found != self._dtypes:
            pairs = zip(self.names, self._dtypes, found, strict=True)
            name, was, now = next(pair for pair in pairs if pair[1] != pair[2])
            raise UserError(
                f"buffer {name!r}",
                got=f"dtype {now} after a forward pass",
                expected=f"dtype {was} as before",
                fix="register the buffer with the dtype that forward writes",
            )

    def put(self, values: torch.Tensor) -> None:
        """Set the values of a vector as returned by ``vector``, of any dtype."""
        if targets := self.tensors():
            parts = torch.split_with_sizes(values, self._sizes)
            copy_all(targets, [p.view(s) for p, s in zip(parts, self._shapes, strict=True)])

    def any_of(self, flags: torch.Tensor) -> torch.Tensor | bool:
        """Return per buffer whether an element is flagged; a bool if equal for all buffers."""
        if flags.device.type == "cpu":  # on other devices, the host would wait for the answer
            if not flags.any():
                return False
            if flags.all():
                return True
        counts = torch.zeros(len(self.names), dtype=torch.int32, device=flags.device)
        return counts.index_add_(0, self._owners(flags.device), flags.to(torch.int32)) > 0

    def extremes(self, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the least and the greatest value of each buffer; 0 without elements."""
        low, high = (values.new_zeros(len(self.names)) for _ in range(2))
        owners = self._owners(values.device)
        low.scatter_reduce_(0, owners, values, "amin", include_self=False)
        high.scatter_reduce_(0, owners, values, "amax", include_self=False)
        return low, high

    def spread(self, per_buffer: torch.Tensor) -> torch.Tensor:
        """Return each buffer's value repeated for all of its elements."""
        return per_buffer[self._owners(per_buffer.device)]

    @property
    def has_rows(self) -> bool:
        """True if a buffer has more than one dimension."""
        return any(len(shape) > 1 for shape in self._shapes)

    def partly(self, changed: torch.Tensor, weights: Sequence[float]) -> list[str]:
        """Return the buffers with changes in a part of the slices along a dimension.

        Args:
            changed: flag of each element: changed or not.
            weights: weight by buffer; zero if no element changed.
        """
        parts = torch.split_with_sizes(changed, self._sizes)
        return [
            name
            for name, part, shape, weight in zip(
                self.names, parts, self._shapes, weights, strict=True
            )
            if weight and len(shape) > 1 and _is_partly(part.view(shape))
        ]

    def pointers(self, queues: Sequence[str]) -> list[int]:
        """Return the numbers of single-element buffers in the modules of queues."""
        modules = {name.rpartition(".")[0] for name in queues}
        return [
            number
            for number, (name, size) in enumerate(zip(self.names, self._sizes, strict=True))
            if size == 1 and name.rpartition(".")[0] in modules
        ]

    def _owners(self, device: torch.device) -> torch.Tensor:
        if device not in self._owner:
            sizes = torch.tensor(self._sizes)
            self._owner[device] = torch.repeat_interleave(sizes).to(device)
        return self._owner[device]


def copier(source: Buffers, *, snapshot: bool) -> Callable[[Buffers], None]:
    """Return a function that copies ``source`` to buffers, with present values if ``snapshot``."""
    if not snapshot:
        return lambda buffers: buffers.copy_(source)
    # The replica's own buffers are the source: their present values are copied.
    values, integer_buffers = source.values(), source.integer_buffers()
    return lambda buffers: buffers.set(values, integer_buffers)


def _equal(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Return whether all values are equal; False where the host would have to wait for a device."""
    return one.device.type == "cpu" and torch.equal(one, other)


def _real(tensor: torch.Tensor) -> torch.Tensor:
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor


def _device(values: torch.Tensor | None, counters: _Part) -> torch.device:
    """Return the device for sums of buffers in float64."""
    if values is not None:
        return values.device
    (*_, last) = _together(counters.tensors())
    return last.device if has_float64(last.device) else torch.device("cpu")


def _together(values: list[torch.Tensor]) -> list[torch.Tensor]:
    """Return the values on one device."""
    devices = {value.device for value in values}
    return values if len(devices) <= 1 else [value.cpu() for value in values]


def _is_partly(changed: torch.Tensor) -> bool:
    """Return whether some whole slices along the first or last dimension changed, and not all."""
    for dim in (0, -1):
        rows = changed.movedim(dim, 0).flatten(1)
        whole = rows.all(1)
        if whole.any() and not whole.all() and not rows[~whole].any():
            return True
    return False
