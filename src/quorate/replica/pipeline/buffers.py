"""Buffers in stages: each shard begins with the coordinator's values, while others are under way.

Between a shard's forward pass and its backward pass other shards begin. What a graph has saved for
the backward pass must not be written meanwhile: autograd refuses that. So a buffer that has its
value already is left alone, and the statistics of a normalisation, which change with every shard,
are put in as new tensors.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from quorate.replica.digest import same_bits
from quorate.replica.precision import NORMS


class Restored:
    """Gives a model the values of buffers that a shard begins with.

    Args:
        model: of the process.
        values: by name, as ``named_buffers`` has them; others are left alone.
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
        """Put the values in."""
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
    """Return whether two tensors, of whatever devices, have the same bits."""
    if one is None or other is None:
        return one is other
    return same_bits([(one, other)])[0]
