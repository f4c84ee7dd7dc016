"""Trained parameters that a forward pass writes: renormalised, clamped, initialised by the data.

A shard is computed alone, so what it writes must reach no other. A replica computes from private
copies of such parameters, taken anew for each shard. What the shard wrote goes with its sum, and
into the coordinator's parameters before the update: of each element what the first shard wrote, in
the order of shards, that changed it. Where all shards write the same (a norm that is kept below a
bound, a clamp) that is what a plain loop does over the whole batch; else it is the same on any
number of workers.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch

from quorate.replica.flat import Flat, Layout
from quorate.replica.spread import Scattered

_MASK = "written "  # no name of a parameter has a blank in it


def layout(parameters: Mapping[str, torch.Tensor], names: Iterable[str]) -> Layout:
    """Return where values of the named parameters lie, and of each element whether it was written.

    Args:
        parameters: the coordinator's, by name, in the dtypes of the masters.
    """
    wanted = set(names)
    tensors = [(name, tensor) for name, tensor in parameters.items() if name in wanted]
    masks = [(_MASK + name, torch.empty_like(t, dtype=torch.uint8)) for name, t in tensors]
    return Layout([*tensors, *masks])


class Writes:
    """One replica's private copies of what its forward pass writes.

    Args:
        names: of these parameters.
        parameters: the coordinator's.
    """

    def __init__(self, names: Iterable[str], parameters: Flat) -> None:
        self._layout = layout(parameters.views, names)
        self.names = tuple(name for name in parameters.views if name in set(names))

    def begin(self, trained: Mapping[str, torch.nn.Parameter], values: Flat | Scattered) -> None:
        """Make the parameters private copies of what a shard is computed from."""
        for name in self.names:
            trained[name].data = values.views[name].clone()

    @torch.no_grad()
    def taken(self, trained: Mapping[str, torch.nn.Parameter], values: Flat | Scattered) -> Flat:
        """Return what a shard wrote, on the parameters' device, in the dtypes of the masters.

        Args:
            trained: the replica's parameters, after the shard.
            values: those that ``begin`` was given.
        """
        written = self._layout.new(torch.device("cpu"))
        for name in self.names:
            now, before = trained[name].data, values.views[name]
            changed = ~_same_bits(now, before)
            written.views[_MASK + name].copy_(changed)
            written.views[name].copy_(now)
        return written


def add(left: Flat, right: Flat) -> None:
    """Add what shards to the right have written: where the left ones wrote, that stays."""
    for name, values, mask in _each(left):
        torch.where(mask.bool(), values, right.views[name], out=values)
        mask.bitwise_or_(right.views[_MASK + name])


def put(written: Flat, parameters: Flat) -> None:
    """Put what shards wrote into the coordinator's parameters."""
    for name, values, mask in _each(written):
        target = parameters.views[name]
        target.copy_(torch.where(mask.bool().to(target.device), values.to(target.device), target))


def _each(written: Flat) -> Iterable[tuple[str, torch.Tensor, torch.Tensor]]:
    for name, values in written.views.items():
        if not name.startswith(_MASK):
            yield name, values, written.views[_MASK + name]


def _same_bits(one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """Return of each element whether it has the same bits. -0.0 is another than 0.0, NaN itself."""
    integers = _INTEGERS.get(one.element_size())
    if integers is None:  # complex128
        return (
            torch.view_as_real(one)
            .view(torch.int64)
            .eq(torch.view_as_real(other).view(torch.int64))
            .all(dim=-1)
        )
    # Views by dtype want the last dimension to be dense; a comparison by bytes does not care.
    return one.contiguous().view(integers) == other.contiguous().view(integers)


_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
