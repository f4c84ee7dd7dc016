"""Buffers in stages: each shard begins with the coordinator's values, beside further shards.

Between a shard's forward and backward pass, further shards begin. Tensors saved by a graph for the
backward pass must not be written meanwhile: autograd refuses the backward pass. So a buffer with
the right value is left alone, and the statistics of normalisations, which change with every shard,
are set as new tensors.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from quorate.replica.digest import same_bits
from quorate.replica.precision import NORMS


class BufferSetter:
    """A setter of the buffers' values at the beginning of a shard.

    Args:
        model: the model of the process.
        values: values by the names of ``named_buffers``; other buffers are left alone.
    """

    def __init__(self, model: torch.nn.Module, values: Mapping[str, torch.Tensor]) -> None:
        self._values = values
        self._model = model
        self._norms: dict[str, tuple[torch.nn.Module, str]] = {}
        for path, module in model.named_modules():
            if isinstance(module, torch.nn.Module) and isinstance(module, NORMS):
                for name, _ in module.named_buffers(recurse=False):
                    self._norms[f"{path}.{name}".lstrip(".")] = (module, name)

    @torch.no_grad()
    def __call__(self, _buffers: object = None) -> None:
        """Set the values."""
        found = [
            (name, buffer, self._values[name])
            for name, buffer in self._model.named_buffers()
            if name in self._values
        ]
        is_there = same_bits((buffer, value) for _, buffer, value in found)
        for (name, buffer, value), is_same in zip(found, is_there, strict=True):
            if is_same:
                continue
            if name in self._norms:
                module, short = self._norms[name]
                setattr(module, short, value.clone())
            else:
                buffer.copy_(value)


def are_same(one: torch.Tensor | None, other: torch.Tensor | None) -> bool:
    """Return whether two tensors, on any devices, have the same bits."""
    if one is None or other is None:
        return one is other
    return same_bits([(one, other)])[0]
