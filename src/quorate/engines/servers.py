"""Servers: processes elsewhere that have a slice each of the parameters, and make updates of it.

How they are reached is a transport's matter, and what they do with their slice is training's. Here
is what both know: how vectors are cut, and what is said.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol

import numpy as np
import torch

from quorate.coordination.ownership import slices
from quorate.replica.flat import Flat, Layout

Image = np.ndarray[tuple[int], np.dtype[np.uint8]]
Told = dict[str, Any]  # as JSON has it
Answer = tuple[Told, Image]  # an image may be empty


class Slicing:
    """How the vectors of a layout are cut: one stretch of each per server, of whole blocks.

    So a slice of parameters, or of gradients, is the same on every machine, and a norm over blocks
    is the same number for any number of servers.

    Args:
        count: S, of servers.
    """

    def __init__(self, layout: Layout, count: int) -> None:
        self.count = count
        # By server, then by vector.
        cuts = [slices(range(size), count) for size in layout.sizes]
        self.of = [[of[number] for of in cuts] for number in range(count)]

    def cut(self, flat: Flat, number: int) -> Image:
        """Return the bytes of a slice; where there is one vector they are no copy."""
        parts = [part for part in self._parts(flat, number) if part.numel()]
        images = [as_bytes(part) for part in parts]
        return images[0] if len(images) == 1 else joined(images)

    def put(self, flat: Flat, number: int, image: Image) -> None:
        """Write the bytes of a slice to where they belong."""
        at = 0
        for part in self._parts(flat, number):
            target = as_bytes(part)
            target[:] = image[at : at + target.nbytes]
            at += target.nbytes

    def _parts(self, flat: Flat, number: int) -> list[torch.Tensor]:
        return [v[of.start : of.stop] for v, of in zip(flat.vectors, self.of[number], strict=True)]


class Handler(ABC):
    """What a server does with its slice. All of it is called in one thread."""

    @abstractmethod
    def take(self, ticket: int, step: int, image: Image) -> None:
        """Take a shard's gradient. The image is gone when this has returned."""

    @abstractmethod
    def keep(self, ticket: int, step: int, shard: int, leaves: int) -> None:
        """Add a shard to the sum of its step, which is of so many."""

    @abstractmethod
    def do(self, told: Mapping[str, Any], image: Image) -> Answer:
        """Do what the coordinator asks for. What is answered is valid until the next call."""


class Servers(Protocol):
    """The coordinator's end of all servers.

    Whatever blocks raises ServerError if one is lost.
    """

    count: int  # S
    where: Sequence[str]  # each is, for people
    have_newest: bool  # whether workers are to compute from theirs, or from the coordinator's

    def keep(self, ticket: int, step: int, shard: int, leaves: int) -> None:
        """Have all add a shard, which they have, to the sum of its step. Does not block.

        Args:
            leaves: V, of the step.
        """

    def ask(self, told: Sequence[Told], images: Sequence[Image] = ()) -> list[Answer]:
        """Ask each server for something of its own, and return the answers. Blocks."""

    def renew(self, told: Sequence[Told], images: Sequence[Image] = ()) -> list[Told]:
        """Likewise, for images that workers compute from as long as they are the newest. Blocks."""

    def values(self) -> list[Image]:
        """Return the images that workers compute from. Blocks."""

    def watch(self, ring: Callable[[], None]) -> None:
        """Have somebody woken when one is lost; any thread may call it then."""


NO_IMAGE: Image = np.empty(0, np.uint8)


def joined(images: Iterable[Image]) -> Image:
    """Return bytes one behind the other, in memory of their own."""
    return np.concatenate([NO_IMAGE, *images])


def as_bytes(values: torch.Tensor) -> Image:
    """Return the bytes of a contiguous vector on the CPU, as they lie there."""
    if not values.numel():
        return NO_IMAGE
    image: Image = values.detach().view(torch.uint8).numpy()
    return image


class RemoteGradient(Flat):
    """The gradient of a shard, or of some, of one step.

    Args:
        step: that they are of.
        ticket: that servers know the shard's by.
    """

    def __init__(self, step: int, ticket: int) -> None:
        super().__init__(Layout(()), [])
        self.step, self.ticket = step, ticket
        self.shards = 1
        self.factor = 1.0  # that the mean is to be multiplied by

    def on(self, device: torch.device) -> RemoteGradient:  # noqa: ARG002
        """Return self: it is on no device of this process."""
        return self

    def add_(self, other: Flat) -> RemoteGradient:
        """Note that others belong to the sum too: servers have added them."""
        assert isinstance(other, RemoteGradient)
        self.shards += other.shards
        return self

    def div_(self, divisor: float) -> None:
        """Do nothing: servers divide by the weight of a whole sum, see ``Serving.add``."""

    def mul_(self, factor: float) -> None:
        """Note a factor: servers multiply as they step."""
        self.factor *= factor
