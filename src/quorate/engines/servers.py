"""Servers: processes on a cluster, each with a slice of the parameters, that make the updates.

The engine starts and reaches the servers, and training implements the work of a server. This module
has the protocols of both sides; ``Partition.among`` cuts vectors into slices.

A gradient arrives at all servers first. Then the coordinator decides, and all servers keep or drop
the gradient. After an update each server has a new image of its slice; an image never changes. The
coordinator sends workers the images of one update with each shard. So no worker reads a mixture of
updates, and the version of a dealt shard is the version of all slices.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol

import numpy as np
import torch

from quorate.replica.flat import Flat, Layout

Image = np.ndarray[tuple[int], np.dtype[np.uint8]]
Told = dict[str, Any]  # a request or an answer, as a message
Answer = tuple[Told, Image]  # the image may be empty


class SliceHandler(ABC):
    """The work of a server with its slice. All methods are called in the same thread."""

    @abstractmethod
    def take(self, ticket: int, image: Image) -> None:
        """Take a shard's gradient. The image is valid until ``take`` returns."""

    @abstractmethod
    def keep(self, ticket: int, step: int, shard: int, leaves: int) -> None:
        """Add a shard to the sum of its step, a sum of ``leaves`` shards in all."""

    @abstractmethod
    def drop(self, ticket: int) -> None:
        """Forget a shard's gradient, which may arrive later, or never."""

    @abstractmethod
    def do(self, told: Mapping[str, Any], image: Image) -> Answer:
        """Carry out a request of the coordinator. The answer is valid until the next call."""


class Servers(Protocol):
    """The coordinator's end of all servers.

    Every blocking method raises ServerError if a server is lost.
    """

    count: int  # S
    where: Sequence[str]  # the node of each server, in words
    have_newest: bool  # whether workers compute from the servers' parameters

    def keep(self, ticket: int, step: int, shard: int, leaves: int) -> None:
        """Have all servers add a received shard to the sum of its step. Does not block.

        Args:
            leaves: the number V of shards of the step.
        """

    def drop(self, ticket: int) -> None:
        """Have all servers forget a shard that is not needed. Does not block."""

    def ask(self, told: Sequence[Told], images: Sequence[Image] = ()) -> list[Answer]:
        """Send each server a request, and return the answers. Blocks."""

    def renew(self, told: Sequence[Told], images: Sequence[Image] = ()) -> list[Told]:
        """Send requests for new parameters, and have workers compute from the images. Blocks."""

    def values(self) -> list[Image]:
        """Return the images of the workers' parameters. Blocks."""


NO_IMAGE: Image = np.empty(0, np.uint8)


def as_image(tensors: Sequence[torch.Tensor]) -> Image:
    """Return the bytes of contiguous vectors on the CPU; a view of a single vector, else a copy."""
    images = [as_bytes(tensor) for tensor in tensors if tensor.numel()]
    return images[0] if len(images) == 1 else np.concatenate([NO_IMAGE, *images])


def read_image(image: Image, tensors: Iterable[torch.Tensor]) -> Image:
    """Copy bytes to contiguous vectors on the CPU, and return the remaining bytes."""
    at = 0
    for tensor in tensors:
        target = as_bytes(tensor)
        target[:] = image[at : at + target.nbytes]
        at += target.nbytes
    return image[at:]


def as_bytes(values: torch.Tensor) -> Image:
    """Return a view of the bytes of a contiguous vector on the CPU."""
    if not values.numel():
        return NO_IMAGE
    image: Image = values.detach().view(torch.uint8).numpy()
    return image


class RemoteGradient(Flat):
    """The gradient of a shard, or a sum of gradients of a step, on the servers.

    Args:
        step: the step of the shard.
        ticket: names the shard's gradient in messages to servers.
    """

    def __init__(self, step: int, ticket: int) -> None:
        super().__init__(Layout(()), [])
        self.step, self.ticket = step, ticket
        self.shards = 1
        self.factor = 1.0  # of the mean, applied by the servers

    def on(self, device: torch.device) -> RemoteGradient:  # noqa: ARG002
        """Return self: no device of this process has the gradient."""
        return self

    def add_(self, other: Flat) -> RemoteGradient:
        """Count further shards of the sum: servers have added the gradients."""
        assert isinstance(other, RemoteGradient)
        self.shards += other.shards
        return self

    def div_(self, divisor: float) -> None:
        """Do nothing: servers divide by the weight of the whole sum."""

    def mul_(self, factor: float) -> None:
        """Note a factor: servers multiply as they step."""
        self.factor *= factor
