"""The buffers of a model: BatchNorm's averages, counters, tables. What a shard reads and may write.

Of a step's shards the floating-point ones are averaged, weighted; all others are the first shard's.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from functools import partial

import torch

from quorate.replica.torch_internals import copy_all

_Lookup = Callable[[], torch.Tensor]


class Buffers:
    """The buffers of one module, as vectors: floating-point ones, and the bytes of all others.

    Args:
        model: the module.
        mutable_frozen: numbers of the frozen parameters, in the model's order, that its forward
            pass writes: Keras keeps its statistics in such. They are buffers by another name.
    """

    def __init__(self, model: torch.nn.Module, mutable_frozen: Collection[int] = ()) -> None:
        # Looked up anew each time: a forward pass may put another tensor in a buffer's place.
        lookups: list[_Lookup] = [
            partial(getattr, module, name)
            for module in model.modules()
            for name, _ in module.named_buffers(recurse=False)
        ]
        parameters = [p for number, p in enumerate(model.parameters()) if number in mutable_frozen]
        lookups += [partial(_itself, parameter) for parameter in parameters]
        seen: set[int] = set()
        self._floats: list[_Lookup] = []
        self._others: list[_Lookup] = []
        for lookup in lookups:
            buffer = lookup()
            if id(buffer) in seen:
                continue
            seen.add(id(buffer))
            (self._floats if buffer.is_floating_point() else self._others).append(lookup)

    def floats(self) -> list[torch.Tensor]:
        """Return the floating-point buffers as they are now."""
        return [lookup().detach() for lookup in self._floats]

    def others(self) -> list[torch.Tensor]:
        """Return all other buffers as they are now."""
        return [lookup().detach() for lookup in self._others]

    def copy_(self, source: Buffers) -> None:
        """Take the values of the same model's buffers elsewhere."""
        for mine, theirs in ((self.floats(), source.floats()), (self.others(), source.others())):
            if mine:
                copy_all(mine, theirs)

    def weighted(self, weight: float) -> torch.Tensor | None:
        """Return weight * values of the floating-point buffers, one float64 vector.

        In float64 the product of a float32 value and a row count, and sums of such, are exact, so
        that a buffer that no shard changed (a table of positions) comes back bit for bit.
        """
        values = _together(self.floats())
        if not values:
            return None
        if values[0].device.type == "mps":  # it has no float64
            values = [value.cpu() for value in values]
        flat = torch.cat([v.reshape(-1).to(torch.float64) for v in values])
        return flat.mul_(weight) if weight > 0 else flat.zero_()  # 0 * nan is nan

    def integer_buffers(self) -> torch.Tensor | None:
        """Return the bytes of all other buffers, one uint8 vector."""
        values = _together(self.others())
        if not values:
            return None
        return torch.cat([v.contiguous().reshape(-1).view(torch.uint8) for v in values])

    def set(self, floats: torch.Tensor | None, integer_buffers: torch.Tensor | None) -> None:
        """Take values as ``weighted(1.0)`` and ``integer_buffers()`` would give them."""
        if floats is not None:
            values = self.floats()
            for value, part in zip(
                values, _split(floats, [v.numel() for v in values]), strict=True
            ):
                value.copy_(part.view(value.shape))
        if integer_buffers is not None:
            values = self.others()
            sizes = [v.numel() * v.element_size() for v in values]
            for value, part in zip(values, _split(integer_buffers, sizes), strict=True):
                value.copy_(part.clone().view(value.dtype).view(value.shape))


def copier(source: Buffers, *, snapshot: bool) -> Callable[[Buffers], None]:
    """Return what gives buffers the values of ``source``: of each time, or as they are now."""
    if not snapshot:
        return lambda buffers: buffers.copy_(source)
    # The replica's own buffers are the source: what they are now is kept apart.
    floats, integer_buffers = source.weighted(1.0), source.integer_buffers()
    return lambda buffers: buffers.set(floats, integer_buffers)


def _together(values: list[torch.Tensor]) -> list[torch.Tensor]:
    """Return the same values, on one device."""
    devices = {value.device for value in values}
    return values if len(devices) <= 1 else [value.cpu() for value in values]


def _split(vector: torch.Tensor, sizes: list[int]) -> Sequence[torch.Tensor]:
    return torch.split_with_sizes(vector, sizes)


def _itself(parameter: torch.Tensor) -> torch.Tensor:
    return parameter
