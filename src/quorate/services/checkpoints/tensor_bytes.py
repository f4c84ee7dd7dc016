"""The bytes of tensors: from memory to a file and back, on any device."""

from __future__ import annotations

import os

import torch

from quorate.replica.digest import flat_bytes


def write_at(descriptor: int, values: torch.Tensor, start: int) -> None:
    """Write the elements of a tensor in row-major order to an open file, from byte ``start`` on.

    Raises:
        OSError: the file cannot be written.
    """
    left = flat_bytes(values.detach().cpu()).numpy().data
    while left:
        done = os.pwrite(descriptor, left, start)  # at most 2 GiB at a time
        left, start = left[done:], start + done


def read_at(descriptor: int, into: torch.Tensor, start: int) -> None:
    """Read the elements of a contiguous tensor from byte ``start`` of an open file on.

    Raises:
        OSError: the file cannot be read.
        EOFError: the file is too short.
    """
    here = into.detach() if into.device.type == "cpu" else torch.empty_like(into, device="cpu")
    left = flat_bytes(here).numpy().data
    while left:
        done = os.preadv(descriptor, [left], start)
        if done == 0:
            raise EOFError(f"the file ends at byte {start:,}")
        left, start = left[done:], start + done
    if here.data_ptr() != into.data_ptr():
        into.detach().copy_(here)
