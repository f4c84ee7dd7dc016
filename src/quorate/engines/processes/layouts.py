"""Layouts of vectors as a worker is told of them, and whether it made the same model."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

import torch

from quorate.errors import UserError
from quorate.replica.flat import Layout

# Of each tensor: name, dtype, shape, strides.
Description = list[list[Any]]


def described(layout: Layout) -> Description:
    """Return a layout, but for which gradients are kept by rows, in JSON."""
    return [
        [s.name, str(layout.dtypes[s.vector]).removeprefix("torch."), list(s.shape), list(s.stride)]
        for s in layout.sections.values()
    ]


def layout_of(description: Description, by_rows: Collection[str] = ()) -> Layout:
    """Return the layout that was described."""

    def tensors() -> Iterable[tuple[str, torch.Tensor]]:
        for name, dtype, shape, stride in description:
            dtype = getattr(torch, dtype)
            yield name, torch.empty_strided(shape, stride, dtype=dtype, device="meta")

    return Layout(tensors(), by_rows)


def is_channels_last(_name: str, _dtype: str, shape: list[int], stride: list[int]) -> bool:
    """Whether a tensor that was described has this format."""
    # Not is_contiguous(): a tensor of one channel is contiguous in both formats.
    return len(shape) == 4 and tuple(stride) != torch.empty(shape, device="meta").stride()


def compare(coordinators: Description, own: Description) -> None:
    """Refuse another model. Strides do not count: the coordinator chose the memory format.

    Raises:
        UserError: a worker made another.
    """
    for expected, got in zip(coordinators, own, strict=False):
        if expected[:3] != got[:3]:
            raise UserError(_another_model(f"parameter {got[:3]}", f"{expected[:3]}"))
    if len(coordinators) != len(own):
        raise UserError(_another_model(f"{len(own)} parameters", f"{len(coordinators)}"))


def _another_model(got: str, expected: str) -> str:
    return (
        f"a worker that ran the script again made another model: got {got}, expected {expected} as "
        "in the coordinator; make the script repeatable, or use engine='towers'"
    )
