"""Homes: where parameters are to lie, in vectors that workers read, and where user code puts them.

``p.data = values`` gives a parameter other memory, in an optimizer as in a callback. Its values are
copied home then. They may lie in the homes themselves, of other parameters or of its own: two
parameters that were exchanged, or the memory that an optimizer holds on to until it restores it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import torch


class Home(NamedTuple):
    """A parameter, and where its values are to be."""

    name: str  # the user's
    parameter: torch.nn.Parameter
    tensor: torch.Tensor

    @property
    def is_left(self) -> bool:
        """Whether the parameter was given other memory, or reads it otherwise."""
        # Not is_set_to(), which not every kind of device has. What differs most often comes first.
        there, here = self.parameter, self.tensor
        return (
            there.data_ptr() != here.data_ptr()
            or there.shape != here.shape
            or there.stride() != here.stride()
            or there.dtype != here.dtype
            or there.device != here.device
        )

    @property
    def fits(self) -> bool:
        """Whether the parameter's values have a place there."""
        return self.parameter.shape == self.tensor.shape


class Memory:
    """Where values of a parameter were, before they were brought home."""

    def __init__(self, name: str, values: torch.Tensor) -> None:
        self.name = name
        self._values = values
        self._sum = sum_of_bits(values)

    @property
    def is_written(self) -> bool:
        """Whether there are others now."""
        return sum_of_bits(self._values) != self._sum


def left(homes: Collection[Home]) -> list[Home]:
    """Return those that their parameters have left, with values that have a place there."""
    return [home for home in homes if home.is_left and home.fits]


@torch.no_grad()
def bring_home(homes: Sequence[Home]) -> None:
    """Copy parameters' values to their homes, and have them lie there again."""
    if not homes:  # after each step, but for very few
        return
    _copy_in(homes)
    for home in homes:
        home.parameter.data = home.tensor


@contextmanager
def at_home(homes: Collection[Home]) -> Iterator[None]:
    """Within the block parameters are at home, with the values that they have wherever they lie.

    Afterwards what the block wrote there is in the parameters, which lie where they did, and each
    home is as it was: its memory is still somebody's.
    """
    away = left(homes)
    with torch.no_grad():
        before = [home.tensor.clone() for home in away]
        lay = [home.parameter.data for home in away]
        _copy_in(away)
        for home in away:  # a rank of a collective computes with these parameters themselves
            home.parameter.data = home.tensor
        try:
            yield
        finally:
            for home, there in zip(away, lay, strict=True):
                home.parameter.data = there
            written = [home.tensor.clone() for home in away]
            for home, value in zip(away, before, strict=True):
                home.tensor.copy_(value)
            for home, value in zip(away, written, strict=True):
                if not torch.equal(home.parameter, value):
                    home.parameter.copy_(value)


def _copy_in(homes: Sequence[Home]) -> None:
    places = {_memory(home.tensor) for home in homes}
    # All are read before any is written: one's values may be in another's home.
    values = [
        value.clone() if _memory(value) in places else value
        for value in (home.parameter.detach() for home in homes)
    ]
    for home, value in zip(homes, values, strict=True):
        home.tensor.copy_(value)


def _memory(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def sum_of_bits(values: torch.Tensor) -> int:
    """Return a number that a write changes, and a value that is no number leaves what it is."""
    real = torch.view_as_real(values) if values.is_complex() else values
    integers = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    return int(real.contiguous().view(integers[real.element_size()]).sum())
