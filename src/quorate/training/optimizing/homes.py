"""Homes: the places of parameters in the vectors that workers read; user code may move parameters.

``p.data = values``, in an optimizer or in a callback, gives a parameter other memory. The values
are then copied to the parameter's home. The values may lie in a home themselves, of another
parameter or of the same: two parameters may have been exchanged, or the optimizer may hold on to
memory until it restores the parameter.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import torch

from quorate.replica.witness.guard import bit_sum


class ParameterHome(NamedTuple):
    """A parameter, and the place of its values in the flat vectors."""

    name: str  # the user's name of the parameter
    parameter: torch.nn.Parameter
    tensor: torch.Tensor

    @property
    def is_left(self) -> bool:
        """True if the parameter has left its home, or has another shape, stride or dtype."""
        # Not is_set_to(), which some kinds of devices lack. The most frequent difference comes
        # first.
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
        """True if the home has a place for the parameter's values."""
        return self.parameter.shape == self.tensor.shape


class FormerMemory:
    """Memory that held the values of a parameter before they were copied home."""

    def __init__(self, name: str, values: torch.Tensor) -> None:
        self.name = name
        self._values = values
        self._sum = bit_sum(values)

    @property
    def is_written(self) -> bool:
        """True if the memory was written since."""
        return not self._sum.equal(bit_sum(self._values))


def left(homes: Collection[ParameterHome]) -> list[ParameterHome]:
    """Return the homes whose parameters have moved, with values of a fitting shape."""
    return [home for home in homes if home.is_left and home.fits]


@torch.no_grad()
def bring_home(homes: Sequence[ParameterHome]) -> None:
    """Copy the values of parameters to their homes, and point the parameters to the homes again."""
    if not homes:  # after each step of most optimizers
        return
    _copy_in(homes)
    for home in homes:
        home.parameter.data = home.tensor


@contextmanager
def at_home(homes: Collection[ParameterHome]) -> Iterator[None]:
    """Put parameters at home inside the block, with their current values.

    Afterwards, values written in the block are copied to the parameters' own memory, and each home
    has its former content: the memory of a home may be in use.
    """
    away = left(homes)
    with torch.no_grad():
        before = [home.tensor.clone() for home in away]
        lay = [home.parameter.data for home in away]
        _copy_in(away)
        for home in away:  # a rank of a collective computes with these parameters
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


def _copy_in(homes: Sequence[ParameterHome]) -> None:
    places = {_memory(home.tensor) for home in homes}
    # All values are read before any is written: the values of a parameter may lie in another home.
    values = [
        value.clone() if _memory(value) in places else value
        for value in (home.parameter.detach() for home in homes)
    ]
    for home, value in zip(homes, values, strict=True):
        home.tensor.copy_(value)


def _memory(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()
