"""Trained parameters that a forward pass writes: renormalised, clamped, initialised from the data.

Shards are independent, so writes of one shard must reach no other. A replica computes from private
copies of such parameters, made anew for each shard. The writes of a shard are sent with its sum,
and enter the coordinator's parameters before the update: for each element the value written by the
first shard, in the order of shards, that changed the element. Where all shards write the same value
(a norm kept below a bound, a clamp), this equals a plain loop over the whole batch; otherwise the
result is the same on any number of workers.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch

from quorate.replica.flat import Flat, Layout
from quorate.replica.spread import SplitFlat

_MASK = "written "  # names of parameters contain no blank


def layout(parameters: Mapping[str, torch.Tensor], names: Iterable[str]) -> Layout:
    """Return the layout of the values of the named parameters, and of a written mask per element.

    Args:
        parameters: the coordinator's parameters, by name, in the dtypes of the masters.
    """
    wanted = set(names)
    tensors = [(name, tensor) for name, tensor in parameters.items() if name in wanted]
    masks = [(_MASK + name, torch.empty_like(t, dtype=torch.uint8)) for name, t in tensors]
    return Layout([*tensors, *masks])


class ParameterWrites:
    """One replica's private copies of the parameters that its forward pass writes.

    Args:
        names: names of these parameters.
        parameters: the coordinator's parameters.
    """

    def __init__(self, names: Iterable[str], parameters: Flat) -> None:
        self._layout = layout(parameters.views, names)
        self.names = tuple(name for name in parameters.views if name in set(names))

    def begin(self, trained: Mapping[str, torch.nn.Parameter], values: Flat | SplitFlat) -> None:
        """Replace the parameters by private copies of the values that a shard is computed from."""
        for name in self.names:
            trained[name].data = values.views[name].clone()

    @torch.no_grad()
    def taken(self, trained: Mapping[str, torch.nn.Parameter], values: Flat | SplitFlat) -> Flat:
        """Return the writes of a shard, on the CPU, in the dtypes of the masters.

        Args:
            trained: the replica's parameters, after the shard.
            values: the argument of ``begin``.
        """
        written = self._layout.new(torch.device("cpu"))
        for name in self.names:
            now, before = trained[name].data, values.views[name]
            changed = ~_same_bits(now, before)
            written.views[_MASK + name].copy_(changed)
            written.views[name].copy_(now)
        return written


def add(left: Flat, right: Flat) -> None:
    """Add the writes of shards to the right; elements written by shards to the left are kept."""
    for name, values, mask in _each(left):
        torch.where(mask.bool(), values, right.views[name], out=values)
        mask.bitwise_or_(right.views[_MASK + name])


def put(written: Flat, parameters: Flat) -> None:
    """Put the writes of shards into the coordinator's parameters."""
    for name, values, mask in _each(written):
        target = parameters.views[name]
        target.copy_(torch.where(mask.bool().to(target.device), values.to(target.device), target))


def _each(written: Flat) -> Iterable[tuple[str, torch.Tensor, torch.Tensor]]:
    for name, values in written.views.items():
        if not name.startswith(_MASK):
            yield name, values, written.views[_MASK + name]


def _same_bits(one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """Return for each element whether the bits are equal: 0.0 differs from -0.0, NaN equals NaN."""
    integers = _INTEGERS.get(one.element_size())
    if integers is None:  # complex128
        return (
            torch.view_as_real(one)
            .view(torch.int64)
            .eq(torch.view_as_real(other).view(torch.int64))
            .all(dim=-1)
        )
    # Views by dtype require a dense last dimension; contiguous copies have one.
    return one.contiguous().view(integers) == other.contiguous().view(integers)


_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
